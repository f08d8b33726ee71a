"""Batch scripts of Slurm as specs: what each line becomes, and what is said of the others."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.importing.files import Findings
from clusterddp.importing.reading import Imported, import_files
from clusterddp.planning.slurm import choose_options
from clusterddp.spec.load import load_spec

HEAD = "#!/bin/bash\n#SBATCH -J job -N 2 --ntasks-per-node=1 --gres=gpu:4 -c 32 -t 1:00:00\n"
EACH = "#!/bin/bash\n#SBATCH -J job -N 2 --ntasks-per-node=4 --gpus-per-node=4 -c 8\n"


def imported(tmp_path: Path, text: str, **options: Any) -> Imported:
    path = tmp_path / "train.slurm"
    path.write_text(text)
    return import_files([path], **options)


def values(tmp_path: Path, text: str) -> dict[str, Any]:
    """Return the values of the spec that are no defaults."""
    resolved = load_spec(imported(tmp_path, text).text, environ={})
    return {change["key"]: change["value"] for change in resolved.changes()}


def read(text: str) -> Findings:
    """Return what is found, before a spec is made of it."""
    from clusterddp.importing.script import read_batch_script

    findings = Findings(source="train.slurm")
    read_batch_script(text, findings)
    return findings


def asked(tmp_path: Path, text: str) -> dict[str, str | bool]:
    """Return what the plan of the spec asks sbatch for."""
    return choose_options(imported(tmp_path, text).resolved.job, {}).sbatch


def left(found: Imported | Findings) -> list[tuple[str, str]]:
    return [(each.fate, each.text) for each in found.left]


def test_one_task_per_node_that_runs_torchrun_becomes_a_rank_for_each_process(tmp_path: Path) -> None:
    text = HEAD + "srun torchrun --nnodes 2 --nproc_per_node 4 --max_restarts=3 train.py --lr 0.1\n"
    assert values(tmp_path, text) == {
        "name": "job",
        "launcher": "slurm",
        "resources.nodes": 2,
        "resources.gpus_per_node": 4,
        "resources.cpus_per_task": 8,
        "resources.time": "1:00:00",
        "slurm.gres": "gpu:4",
        "restarts": 3,
        "entry.script": "train.py",
        "entry.args": ["--lr", "0.1"],
    }


def test_the_plan_asks_slurm_for_the_cores_and_gpus_of_the_script(tmp_path: Path) -> None:
    options = asked(tmp_path, HEAD + "srun torchrun --nnodes 2 --nproc_per_node 4 train.py\n")
    sizes = ("nodes", "ntasks", "ntasks_per_node", "cpus_per_task", "gres", "time")
    assert [options[name] for name in sizes] == ["2", "8", "4", "8", "gpu:4", "1:00:00"]
    assert "gpus_per_node" not in options


def test_a_task_for_each_rank_stays_a_task_for_each_rank(tmp_path: Path) -> None:
    options = asked(tmp_path, EACH + "srun python -u train.py\n")
    sizes = ("nodes", "ntasks", "ntasks_per_node", "cpus_per_task", "gpus_per_node")
    assert [options[name] for name in sizes] == ["2", "8", "4", "8", "4"]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ("--gpus-per-node=a100:4", {"gpus_per_node": "a100:4"}),
        ("--gres=gpu:a100:4,nvme:1", {"gres": "gpu:a100:4,nvme:1"}),
        ("--gpus=8", {"gpus": "8"}),
        ("-G v100:8", {"gpus": "v100:8"}),
        ("--gpus-per-task=a100:1", {"gpus_per_node": "a100:4"}),
        ("--cpus-per-gpu=8 --gres=gpu:4", {"cpus_per_task": "8", "gres": "gpu:4"}),
        ("--mem=120G", {"mem": "120G"}),
        ("--mem=64000", {"mem": "64000"}),
        ("--mem 0", {"mem": "0"}),
        ("--mem-per-cpu=4G", {"mem_per_cpu": "4G"}),
        ("-p gpu,long -A vision -q high", {"partition": "gpu,long", "account": "vision", "qos": "high"}),
        ("-C 'a100&nvlink'", {"constraint": "a100&nvlink"}),
        ("-x node[01-03] -w node9", {"exclude": "node[01-03]", "nodelist": "node9"}),
        ("--exclusive", {"exclusive": True}),
        ("--mail-type=END,FAIL --mail-user=ana@lab.org", {"mail_type": "END,FAIL", "mail_user": "ana@lab.org"}),
        ("--dependency=afterok:77", {"dependency": "afterok:77"}),
        ("--hint=nomultithread", {"hint": "nomultithread"}),
        ("--comment='a b'", {"comment": "a b"}),
        ("--a-plugins-option=7", {"a_plugins_option": "7"}),
        ("--part=gpu", {"partition": "gpu"}),
        ("-m block:cyclic", {"distribution": "block:cyclic"}),
    ],
)
def test_options_reach_sbatch_as_they_were(tmp_path: Path, options: str, wanted: dict[str, str | bool | None]) -> None:
    text = f"#SBATCH -N 2 --ntasks-per-node 4\n#SBATCH {options}\nsrun python train.py\n"
    found = asked(tmp_path, text)
    assert {name: found.get(name) for name in wanted} == wanted


def test_every_option_of_sbatch_that_is_clusterddps_own_is_listed(tmp_path: Path) -> None:
    text = (
        "#SBATCH -N 1 -o out.txt -e err.txt\n#SBATCH --array=0-3 -D /work --signal=USR2@90 --wrap=x\nsrun python t.py\n"
    )
    assert left(imported(tmp_path, text)) == [
        ("lost", "#SBATCH --array=0-3"),
        ("lost", "#SBATCH --signal=USR2@90"),
        ("before", "#SBATCH -D /work"),
        ("ours", "#SBATCH -o out.txt"),
        ("ours", "#SBATCH -e err.txt"),
        ("ours", "#SBATCH --wrap=x"),
    ]


@pytest.mark.parametrize("option", ["--time=soon", "-m cyclic:block"])
def test_a_value_that_a_spec_refuses_is_refused_with_the_reason(tmp_path: Path, option: str) -> None:
    with pytest.raises(UsageError, match=r"^train.slurm: .* expected") as caught:
        imported(tmp_path, f"#SBATCH -N 1 {option}\nsrun python t.py\n")
    assert caught.value.hint == f"clusterddp submit {tmp_path / 'train.slurm'} runs it as it is"


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("2880", 172_800), ("90", 5_400), ("1:30:00", 5_400), ("2-00", 172_800), ("UNLIMITED", None), ("0", None)],
)
def test_times_are_those_of_sbatch(tmp_path: Path, time: str, seconds: int | None) -> None:
    limit = imported(tmp_path, f"#SBATCH -N 1 --time={time}\nsrun python t.py\n").resolved.job.resources.time
    assert (limit.seconds if limit else None) == seconds


@pytest.mark.parametrize("option", ["--gres=gpu:{nines}", "--nodes={zeros}1", "--gpus={zeros}1", "--ntasks={zeros}1"])
def test_a_number_of_thousands_of_digits_is_no_internal_error(tmp_path: Path, option: str) -> None:
    option = option.format(nines="9" * 4_400, zeros="0" * 5_000)
    with contextlib.suppress(ClusterddpError):
        imported(tmp_path, f"#!/bin/bash\n#SBATCH {option}\nsrun python t.py\n")


def test_lines_behind_the_first_command_and_of_other_schedulers_are_listed() -> None:
    text = "#PBS -l nodes=2\n# SBATCH -N 9\n##SBATCH -N 8\n#SBATCH -N 1\ndate\n#SBATCH -N 4\nsrun python t.py\n"
    found = read(text)
    assert found.values["resources"]["nodes"] == 1
    assert ("lost", "#SBATCH -N 4") in left(found)
    assert ("lost", "#PBS -l nodes=2") in left(found)


def test_the_last_of_two_equal_options_counts_and_the_other_is_listed() -> None:
    found = read("#SBATCH -N 1 -p a\n#SBATCH --partition=b # the big one\nsrun python t.py\n")
    assert found.values["slurm"]["partition"] == "b"
    assert ("lost", "-p a") in left(found)


@pytest.mark.parametrize(
    ("command", "entry"),
    [
        ("srun python train.py --a 'b c' \"d\"", {"script": "train.py", "args": ["--a", "b c", "d"]}),
        ("srun python3.11 -u -m pkg.train -x # note", {"module": "pkg.train", "args": ["-x"]}),
        ("srun -l --mpi=none --cpu-bind=cores python train.py", {"script": "train.py"}),
        ("srun torchrun --nnodes 2 --nproc-per-node=gpu train.py", {"script": "train.py"}),
        ("srun torchrun --nnodes 2 -m pkg.train -x", {"module": "pkg.train", "args": ["-x"]}),
        ("srun torchrun --nnodes 2 --no-python ./train -x", {"command": ["./train", "-x"]}),
        ("srun python -m torch.distributed.run --nnodes=2 train.py", {"script": "train.py"}),
        ("srun ./train --fast", {"command": ["./train", "--fast"]}),
        ("srun python -c 'print(1)'", {"command": ["python", "-c", "print(1)"]}),
        ("srun python train.py --json '{\"a\": 1}' --format '{name}'",
         {"script": "train.py", "args": ["--json", '{"a": 1}', "--format", "{{name}}"]}),
        ("srun apptainer run --nv -B /a:/b a.sif python train.py",
         {"command": ["apptainer", "run", "--nv", "-B", "/a:/b", "a.sif", "python", "train.py"]}),
        ("srun torchrun --nnodes $SLURM_NNODES --rdzv_endpoint $MASTER_ADDR:29500 --node_rank $SLURM_NODEID train.py",
         {"script": "train.py"}),
        ("srun python train.py \\\n  --nodes \"${SLURM_NNODES}\" > log_$SLURM_JOB_ID.txt 2>&1",
         {"script": "train.py", "args": ["--nodes", "2"]}),
        ("srun python t.py \"a\\$5\" '$A' b\\ c \"it's\" x#y ''",
         {"script": "t.py", "args": ["a$5", "$A", "b c", "it's", "x#y", ""]}),
    ],
)  # fmt: skip
def test_the_command_that_trains_is_found_in_what_starts_it(command: str, entry: dict[str, Any]) -> None:
    assert read(HEAD + command + "\n").values["entry"] == entry


@pytest.mark.parametrize(
    ("head", "command", "per_node"),
    [
        (EACH, "srun python t.py", 4),
        (EACH, "srun -n 8 -N 2 python t.py", 4),
        ("#SBATCH -N 2\n", "srun -n 4 python t.py", 2),
        ("#SBATCH -N 2\n", "srun --ntasks-per-node=2 python t.py", 2),
        (HEAD, "srun torchrun --nnodes=2 --nproc_per_node=$SLURM_GPUS_ON_NODE t.py", 4),
        (HEAD, "srun torchrun --nnodes=2 --nproc_per_node=auto t.py", 4),
        (HEAD, "srun torchrun --nnodes=2 t.py", 1),
        ("#SBATCH --gres=gpu:4 -n 1\n", "torchrun --standalone --nproc_per_node=4 t.py", 4),
        ("#SBATCH -n 8 --ntasks-per-node=4\n", "srun python t.py", 4),
        ("#SBATCH --ntasks=6 -N 2\n", "srun python t.py", 3),
        ("#SBATCH -N 2 --gres=gpu:4 --ntasks-per-gpu=1\n", "srun python t.py", 4),
        ("#SBATCH -N 1\n", "python t.py", 1),
    ],
)
def test_ranks_are_counted_as_the_starting_program_does(head: str, command: str, per_node: int) -> None:
    resources = read(f"{head}{command}\n").values["resources"]
    assert resources.get("procs_per_node", resources.get("gpus_per_node", 1)) == per_node


def test_a_python_without_srun_is_one_rank_and_is_listed() -> None:
    found = read("#SBATCH --gres=gpu:4\npython train.py\n")
    assert found.values["resources"]["procs_per_node"] == 1
    assert any("owns_ranks" in each.why for each in found.left)


def test_exported_variables_and_those_of_the_command_reach_the_ranks(tmp_path: Path) -> None:
    found = imported(tmp_path, EACH + "export NCCL_DEBUG=INFO\nLR=0.1\nA=1 srun python t.py\n")
    assert dict(found.resolved.job.env) == {"NCCL_DEBUG": "INFO", "A": "1"}
    assert ("lost", "LR=0.1") in left(found)


def test_what_is_set_behind_the_command_or_unset_before_it_does_not_reach_it() -> None:
    found = read(EACH + "export A=1 B=2\nunset B\nsrun python t.py\nexport C=3\n")
    assert found.values["env"] == {"A": "1"}


@pytest.mark.parametrize(
    "line",
    [
        "export WANDB_API_KEY=mum-4711",
        "API_TOKEN=mum-4711 ./log_in",
        "export A='--token mum-4711'",
        "wandb login 4711" + "0123456789abcdef" * 2 + "0123",
        "curl -H 'Authorization: Bearer hf_mum-4711mum-4711mum'",
        "git clone https://ana:mum-4711@host/x",
        "#SBATCH --comment=hf_mum-4711mum-4711mum-4711",
        "export B=hf_mum-4711mum-4711mum-4711",
        "srun python t.py --token mum-4711",
        "srun python t.py --url=https://ana:mum-4711@host",
        "if [ $KEY = hf_mum-4711mum-4711mum-4711 ]",
        "API_KEY=mum-4711 ./x | y",
        "SLURM_TOKEN='mum-4711 x'",
    ],
)
def test_the_value_of_a_secret_is_written_nowhere(tmp_path: Path, line: str) -> None:
    try:
        found = imported(tmp_path, f"#SBATCH -N 1\n{line}\nsrun python t.py\n")
        shown = f"{found.text}{found.left}"
    except UsageError as error:
        shown = f"{error.message}{error.hint}"
    assert "4711" not in shown


def test_rendezvous_variables_are_left_to_clusterddp() -> None:
    address = 'export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"'
    found = read(f"{EACH}{address}\nexport MASTER_PORT=$((20000 + SLURM_JOB_ID % 999))\nsrun python t.py\n")
    assert "env" not in found.values
    assert [fate for fate, text in left(found) if "MASTER" in text] == ["ours", "ours"]


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        (["module load cuda/12.4", "ml gcc"], {"setup": ["module load cuda/12.4", "ml gcc"]}),
        (["conda activate a", "module load cuda"], {"conda": "a", "setup": ["module load cuda"]}),
        (["module load conda", "conda activate a"], {"setup": ["module load conda", "conda activate a"]}),
        (["module purge", "source ~/venv/bin/activate"], {"venv": "~/venv", "setup": ["module purge"]}),
        (["source $HOME/v/bin/activate"], {"setup": ["source $HOME/v/bin/activate"]}),
        (['conda activate "a"'], {"setup": ['conda activate "a"']}),
        (["source /opt/conda/etc/profile.d/conda.sh", "conda activate a"],
         {"setup": ["source /opt/conda/etc/profile.d/conda.sh", "conda activate a"]}),
        (["export PATH=$HOME/bin:$PATH", "unset A"], {"setup": ["export PATH=$HOME/bin:$PATH", "unset A"]}),
        (["export ROOT=/data", 'export SETS="$ROOT/sets"'],
         {"env": {"ROOT": "/data"}, "setup": ['export SETS="$ROOT/sets"']}),
    ],
)  # fmt: skip
def test_modules_and_environments_become_setup_lines_and_keys(lines: list[str], wanted: dict[str, Any]) -> None:
    found = read(EACH + "\n".join(lines) + "\nsrun python t.py\n")
    assert {key: found.values.get(key) for key in ("venv", "conda", "setup", "env") if key in found.values} == wanted
    assert not left(found)


@pytest.mark.parametrize(
    ("lines", "command", "wanted"),
    [
        ([], "srun /opt/e/bin/python train.py", {"python": "/opt/e/bin/python"}),
        ([], "srun $HOME/e/bin/python3 train.py", {"python": "~/e/bin/python3"}),
        ([], 'srun "${HOME}/my envs/bin/python" -u train.py', {"python": "~/my envs/bin/python"}),
        ([], "srun ~/e/bin/python3.11 -m train", {"python": "~/e/bin/python3.11"}),
        ([], "srun .venv/bin/python train.py", {"python": ".venv/bin/python"}),
        ([], "srun /usr/bin/python3 train.py", {"python": "/usr/bin/python3"}),
        ([], "srun /opt/e/bin/torchrun --nnodes 2 --nproc-per-node 4 train.py", {"python": "/opt/e/bin/python3"}),
        ([], "srun $HOME/e/bin/python -m torch.distributed.run --nnodes 2 --nproc-per-node 4 train.py",
         {"python": "~/e/bin/python"}),
        (["source /opt/e/bin/activate"], "srun /opt/e/bin/python train.py", {"venv": "/opt/e"}),
        (["source ~/e/bin/activate"], "srun $HOME/e/bin/python3 train.py", {"venv": "~/e"}),
        (["source /opt/e/bin/activate"], "srun /opt/f/bin/python train.py",
         {"python": "/opt/f/bin/python", "setup": ["source /opt/e/bin/activate"]}),
        (["conda activate a"], "srun /opt/f/bin/python train.py",
         {"python": "/opt/f/bin/python", "setup": ["conda activate a"]}),
        ([], "srun python train.py", {}),
        ([], "srun python3 train.py", {}),
    ],
)  # fmt: skip
def test_a_python_that_the_script_names_by_its_path_runs_the_ranks(
    tmp_path: Path, lines: list[str], command: str, wanted: dict[str, Any]
) -> None:
    script = (EACH if "torch" not in command else HEAD) + "\n".join([*lines, command]) + "\n"
    found = read(script)
    assert {key: found.values.get(key) for key in ("python", "venv", "conda", "setup") if key in found.values} == wanted
    assert not [each for each in left(found) if each[0] != "ours" and "-u" not in each[1]]
    assert imported(tmp_path, script).resolved.job.python == wanted.get("python")


@pytest.mark.parametrize("program", ["~/.local/bin/torchrun", "python3.11"])
def test_a_program_that_does_not_say_where_its_python_is_is_listed(program: str) -> None:
    options = "--nnodes 2 --nproc-per-node 4" if "torchrun" in program else ""
    found = read(f"{HEAD}srun {program} {options} train.py\n")
    assert "python" not in found.values
    assert program in [text for fate, text in left(found) if fate == "lost"]


@pytest.mark.parametrize("program", ["$ENVS/e/bin/python", "$(which python)/bin/python", "/opt/*/bin/python"])
def test_a_python_whose_path_a_shell_computes_is_refused(program: str) -> None:
    with pytest.raises(UsageError, match="a shell computes"):
        read(f"{EACH}srun {program} train.py\n")


def test_lines_that_need_more_of_your_shell_are_listed_as_steps_before_a_submit() -> None:
    lines = ["module use $SCRATCH/modules", "source $(which activate) a", "cd /work/code"]
    found = read(EACH + "\n".join(lines) + "\nsrun python t.py\n")
    assert [words for fate, words in left(found) if fate == "before"] == lines


@pytest.mark.parametrize(
    "line",
    [
        'srun python t.py --out "$SCRATCH/x"', "srun python t.py --now $(date +%s)", "srun python t.py *.tar",
        "srun python t.py ${A:-b}", "srun python t.py `date`", "srun python t.py ~/x", "srun python t.py $'\\t'",
        "srun python t.py $SLURM_PROCID", 'srun python t.py "$@"', "srun python t.py {a,b}", "A=$HOME/x srun ./t",
        "export A", "export A+=b", "A+=b", "A=(1 2)", "declare -a A", "SLURM_NNODES=3", "export SLURM_NNODES=3",
        "if true; then", "if true", "for a in 1 2; do", "[ -f x ] && rm x", "f() {", "[[ -f x ]]", "echo a | tee b",
        "rm a &", "echo a; srun python t.py", "cat <<EOF", "read -ra A <<< x", "srun python t.py < x", "eval $CMD",
        "exit 0", "trap a USR1", "$CMD", "echo 'a", "echo \"$(a", "time python t.py", "nohup torchrun t.py",
        "test -f x",
        "horovodrun -np 8 python t.py", "conda run python t.py", "srun bash -c 'python t.py'", "env A=1 python t.py",
        "srun apptainer exec a.sif torchrun t.py", "srun --unknown-option value python t.py", "srun -n $N python t.py",
        "srun --gpus-per-task=1 python t.py", "srun -N 1 python t.py", "srun --exclusive python t.py",
        "srun --container-image=a.sqsh python t.py", "srun -n 4 python t.py",
        "mpirun -np 8 python t.py", "mpirun ./train", "accelerate launch --config_file fsdp.yaml t.py",
        "deepspeed --num_gpus 4 t.py", "python -m torch.distributed.launch t.py", "sbatch next.slurm",
        "srun python -m accelerate.commands.launch t.py", "srun python -m torch.distributed.launch t.py",
        "srun python -m accelerate.commands.accelerate_cli launch t.py", "srun python -m deepspeed t.py",
        "srun python -m deepspeed.launcher.launch t.py", "srun python /bin/torchrun t.py",
        "python t.py", "torchrun --nnodes 2 t.py", "srun torchrun --nnodes 2 t.py", "srun torchrun t.py",
        "srun python t.py --token hf_abcdefghijklmnopqrst",
    ],
)  # fmt: skip
def test_what_only_a_shell_can_read_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    with pytest.raises(UsageError, match=r"train.slurm:4: ") as caught:
        imported(tmp_path, f"{EACH}date\n{line}\n")
    assert caught.value.hint == f"clusterddp submit {tmp_path / 'train.slurm'} runs it as it is"


def test_a_quote_that_spans_lines_is_refused() -> None:
    with pytest.raises(UsageError, match=r"train.slurm:3: .* a quote not closed"):
        read(f"{EACH}srun python t.py 'a \\\nb'\n")


def test_every_other_command_is_listed() -> None:
    lost = [
        words for _, words in left(read(EACH + "set -e\necho hi $A\nsync\nsrun python t.py > log 2>&1\nwait # x\n"))
    ]
    for words in ("set -e", "echo hi $A", "sync", "> log", "2>&1", "wait # x"):
        assert words in lost


def test_threads_that_are_the_cores_of_a_rank_are_not_kept_and_others_are(tmp_path: Path) -> None:
    found = imported(tmp_path, EACH + "export OMP_NUM_THREADS=8\nsrun python train.py\n")
    assert ("ours", "export OMP_NUM_THREADS=8") in left(found)
    assert found.resolved.job.env == {}
    assert values(tmp_path, EACH + "export OMP_NUM_THREADS=4\nsrun python train.py\n")["env.OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize("start", ["srun ", ""])
def test_two_commands_that_may_train_are_refused(tmp_path: Path, start: str) -> None:
    text = f"#SBATCH -N 1\n{start}python prepare.py\n{start}python train.py\n"
    with pytest.raises(UsageError, match=r"train.slurm:3: .*python train.py: line 2 is another command"):
        imported(tmp_path, text)


def test_a_python_beside_the_one_command_that_starts_ranks_is_listed() -> None:
    found = read(EACH + "python prepare.py\nsrun python train.py\n")
    assert found.values["entry"] == {"script": "train.py"}
    assert ("lost", "python prepare.py") in left(found)


def test_a_script_without_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no plain command that starts Python"):
        imported(tmp_path, EACH + "./run_all\n")


def test_a_name_that_a_spec_refuses_is_changed_and_listed() -> None:
    found = read("#SBATCH --job-name='my job/1'\nsrun python t.py\n")
    assert found.values["name"] == "my_job_1"
    assert any("my_job_1" in each.why for each in found.left)


def test_a_script_without_a_job_has_the_sizes_of_its_srun(tmp_path: Path) -> None:
    line = "srun -p gpu -A vision -N2 --ntasks-per-node=4 --gres=gpu:4 -c 8 -t 1:00:00 --mem=64G -l python t.py\n"
    options = choose_options(imported(tmp_path, line, kind="slurm").resolved.job, {}).sbatch
    wanted = {
        "partition": "gpu", "account": "vision", "nodes": "2", "ntasks_per_node": "4", "gres": "gpu:4",
        "cpus_per_task": "8", "time": "1:00:00", "mem": "64G",
    }  # fmt: skip
    assert {name: options[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    "job",
    [
        "-n 8", "-N 2-4", "-N 0", "-N 2 -n 5", "-N 2 --ntasks-per-node=four", "-N 2 --cpus-per-gpu=4",
        "-N 2 --ntasks-per-node=4 --gres=gpu:2", "-N 1 --gres=gpu:1234567", "-N 1 --gpus=12345678", "-N 1 --gres=",
        "-N 1 --container-image=a.sqsh",
    ],
)  # fmt: skip
def test_sizes_that_are_not_plain_are_refused_with_their_line(job: str) -> None:
    with pytest.raises(UsageError, match=r"^train.slurm:1: #SBATCH "):
        read(f"#SBATCH {job}\nsrun python t.py\n")


def test_a_job_that_names_its_nodes_and_not_their_number_has_all_of_them(tmp_path: Path) -> None:
    options = asked(tmp_path, "#SBATCH -w node[1-3]\nsrun python t.py\n")
    assert (options["nodes"], options["nodelist"]) == ("3", "node[1-3]")
