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
    options = asked(tmp_path, HEAD + "srun torchrun --nproc_per_node 4 train.py\n")
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
        ("--gpus-per-task=1", {"gpus_per_task": "1"}),
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
        ("-m cyclic:block", {"distribution": None}),
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


def test_a_value_that_a_spec_refuses_is_listed_with_the_reason(tmp_path: Path) -> None:
    found = imported(tmp_path, "#SBATCH -N 1 --time=UNLIMITED\nsrun python t.py\n")
    lost = [each for each in found.left if each.fate == "lost"]
    assert [each.text for each in lost] == ["resources.time: UNLIMITED"]
    assert "leave time out for no limit" in lost[0].why


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
        ("python train.py --a 'b c' \"d\"", {"script": "train.py", "args": ["--a", "b c", "d"]}),
        ("python3.11 -u -m pkg.train -x", {"module": "pkg.train", "args": ["-x"]}),
        ("srun -l --mpi=none --cpu-bind=cores python train.py", {"script": "train.py"}),
        ("torchrun --standalone --nproc-per-node=gpu train.py", {"script": "train.py"}),
        ("torchrun -m pkg.train -x", {"module": "pkg.train", "args": ["-x"]}),
        ("python -m torch.distributed.run --nproc_per_node 2 train.py", {"script": "train.py"}),
        ("python -m torch.distributed.launch --use_env train.py", {"script": "train.py"}),
        ("python -m torch.distributed.launch train.py", {"local_rank_arg": True, "script": "train.py"}),
        ("accelerate launch --num_processes 8 --mixed_precision bf16 t.py -x", {"script": "t.py", "args": ["-x"]}),
        ("deepspeed --num_gpus 4 train.py --deepspeed c.json",
         {"local_rank_arg": True, "script": "train.py", "args": ["--deepspeed", "c.json"]}),
        ("mpirun -np 8 --map-by ppr:4:node -x A=b -x PATH --mca btl tcp,self python train.py", {"script": "train.py"}),
        ("mpiexec.hydra -n 8 -ppn 4 -genv A b python train.py", {"script": "train.py"}),
        ("srun ./train --fast", {"command": ["./train", "--fast"]}),
        ("python train.py --json '{\"a\": 1}' --format '{name}'",
         {"script": "train.py", "args": ["--json", '{"a": 1}', "--format", "{{name}}"]}),
        ("srun --container-image=a.sqsh --container-mounts=/a:/b,/c python train.py", {"script": "train.py"}),
        ("srun apptainer run --nv -B /a:/b a.sif python train.py",
         {"command": ["apptainer", "run", "--nv", "-B", "/a:/b", "a.sif", "python", "train.py"]}),
        ("srun torchrun --rdzv_endpoint $MASTER_ADDR:29500 --node_rank $SLURM_NODEID train.py", {"script": "train.py"}),
        ("srun python train.py \\\n  --nodes \"${SLURM_NNODES}\" > log_$SLURM_JOB_ID.txt 2>&1",
         {"script": "train.py", "args": ["--nodes", "2"]}),
    ],
)  # fmt: skip
def test_the_command_that_trains_is_found_in_what_starts_it(command: str, entry: dict[str, Any]) -> None:
    assert read(HEAD + command + "\n").values["entry"] == entry


@pytest.mark.parametrize(
    ("head", "command", "per_node"),
    [
        (EACH, "srun python t.py", 4),
        (EACH, "srun -n 4 python t.py", 2),
        (EACH, "srun --ntasks-per-node=2 python t.py", 2),
        (HEAD, "srun torchrun --nproc_per_node=$SLURM_GPUS_ON_NODE t.py", 4),
        (HEAD, "srun torchrun --nproc_per_node=auto t.py", 4),
        (HEAD, "srun torchrun t.py", 1),
        (HEAD, "mpirun -np 8 python t.py", 4),
        (HEAD, "mpirun -npernode 2 python t.py", 2),
        (HEAD, "accelerate launch --num_processes 6 t.py", 3),
        (HEAD, "deepspeed t.py", 4),
        ("#SBATCH -n 8 --ntasks-per-node=4\n", "srun python t.py", 4),
        ("#SBATCH --ntasks=6 -N 2\n", "srun python t.py", 3),
        ("#SBATCH -N 2 --gres=gpu:4 --ntasks-per-gpu=1\n", "srun python t.py", 4),
    ],
)
def test_ranks_are_counted_as_the_starting_program_does(head: str, command: str, per_node: int) -> None:
    resources = read(f"{head}{command}\n").values["resources"]
    assert resources.get("procs_per_node", resources.get("gpus_per_node", 1)) == per_node


def test_a_python_without_srun_is_one_rank_and_is_listed() -> None:
    found = read(HEAD + "python train.py\n")
    assert found.values["resources"]["procs_per_node"] == 1
    assert any("owns_ranks" in each.why for each in found.left)


def test_exported_variables_and_those_of_the_command_reach_the_ranks(tmp_path: Path) -> None:
    found = imported(tmp_path, EACH + "export NCCL_DEBUG=INFO\nLR=0.1\nA=1 srun python t.py\n")
    assert dict(found.resolved.job.env) == {"NCCL_DEBUG": "INFO", "A": "1"}
    assert ("lost", "LR=0.1") in left(found)


def test_what_is_set_behind_the_command_or_unset_before_it_does_not_reach_it() -> None:
    found = read(EACH + "export A=1 B=2\nunset B\nsrun python t.py\nexport C=3\n")
    assert found.values["env"] == {"A": "1"}


def test_the_value_of_a_secret_is_written_nowhere(tmp_path: Path) -> None:
    found = imported(tmp_path, EACH + "export WANDB_API_KEY=mum-4711\nAPI_TOKEN=mum-4711 ./log_in\nsrun python t.py\n")
    assert found.resolved.job.secrets == ("WANDB_API_KEY",)
    assert "mum-4711" not in found.text + str(found.left)


def test_rendezvous_variables_are_left_to_clusterddp() -> None:
    address = 'export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"'
    found = read(f"{EACH}{address}\nexport MASTER_PORT=$((20000 + SLURM_JOB_ID % 999))\nsrun python t.py\n")
    assert "env" not in found.values
    assert [fate for fate, text in left(found) if "MASTER" in text] == ["ours", "ours"]


def test_modules_environments_and_directories_are_listed_as_steps_before_a_submit() -> None:
    lines = ["module load cuda/12.4", "ml gcc", "source venv/bin/activate", "conda activate a", "cd /work/code"]
    found = read(EACH + "\n".join(lines) + "\nsrun python t.py\n")
    assert [words for fate, words in left(found) if fate == "before"] == lines


@pytest.mark.parametrize(
    "line",
    [
        'python t.py --out "$SCRATCH/x"', "python t.py --now $(date +%s)", "python t.py *.tar", "python t.py {a,b}",
        "python t.py ${A:-b}", "python t.py `date`", "python t.py ~/x", "python t.py $'\\t'",
        "python t.py $SLURM_PROCID", "A=$HOME/x python t.py", "export A", "export A+=b", "A+=b", "A=(1 2)",
        "declare -a A", "SLURM_NNODES=3",
        "if true; then", "for a in 1 2; do", "[ -f x ] && rm x", "f() {", "[[ -f x ]]", "echo a | tee b", "rm a &",
        "cat <<EOF", "read -ra A <<< x", "python t.py < x", "eval $CMD", "exit 0", "trap a USR1", "$CMD", "echo 'a",
        "echo \"$(a", "time python t.py", "nohup torchrun t.py", "horovodrun -np 8 python t.py",
        "conda run python t.py", "srun bash -c 'python t.py'", "srun apptainer exec a.sif torchrun t.py",
        "srun --unknown-option value python t.py", "srun -n $N python t.py", "mpirun -np $((2 * 4)) python t.py",
        "accelerate launch --config_file fsdp.yaml t.py", "python t.py --token hf_abcdefghijklmnopqrst",
    ],
)  # fmt: skip
def test_what_only_a_shell_can_read_is_refused_with_its_line(line: str) -> None:
    with pytest.raises(UsageError, match=r"^train.slurm:4: ") as caught:
        read(f"{EACH}date\n{line}\n")
    assert caught.value.hint is not None
    assert "a script that entry.command runs" in caught.value.hint


def test_every_other_command_is_listed() -> None:
    lost = [
        words for _, words in left(read(EACH + "set -e\necho hi $A; sync\nsrun python t.py > log 2>&1\nwait # x\n"))
    ]
    for words in ("set -e", "echo hi $A", "sync", "> log", "2>&1", "wait"):
        assert words in lost


def test_threads_that_are_the_cores_of_a_rank_are_not_kept_and_others_are(tmp_path: Path) -> None:
    found = imported(tmp_path, EACH + "export OMP_NUM_THREADS=8\nsrun python train.py\n")
    assert ("ours", "export OMP_NUM_THREADS=8") in left(found)
    assert found.resolved.job.env == {}
    assert values(tmp_path, EACH + "export OMP_NUM_THREADS=4\nsrun python train.py\n")["env.OMP_NUM_THREADS"] == "4"


def test_one_of_two_commands_that_start_ranks_is_chosen_by_its_line(tmp_path: Path) -> None:
    text = EACH + "srun python prepare.py\nsrun python train.py\n"
    with pytest.raises(UsageError) as caught:
        imported(tmp_path, text)
    assert "2 commands start ranks" in caught.value.message
    assert caught.value.hint == "--line 4 takes the last one"
    found = imported(tmp_path, text, line=4)
    assert found.resolved.job.entry is not None
    assert found.resolved.job.entry.script == "train.py"
    assert ("lost", "srun python prepare.py") in left(found)


def test_a_script_without_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no plain command that starts Python"):
        imported(tmp_path, EACH + "./run_all\n")


def test_a_name_that_a_spec_refuses_is_changed_and_listed() -> None:
    found = read("#SBATCH --job-name='my job/1'\nsrun python t.py\n")
    assert found.values["name"] == "my_job_1"
    assert any("my_job_1" in each.why for each in found.left)


@pytest.mark.parametrize(
    ("command", "nodes", "per_node"),
    [
        ("torchrun --nnodes 2 --nproc_per_node 4 t.py", 2, 4),
        ("torchrun --nnodes=2:4 --nproc_per_node 4 t.py", 2, 4),
        ("python -m torch.distributed.launch --nnodes=2 --nproc_per_node=4 t.py", 2, 4),
        ("srun -N2 python t.py", 2, 1),
        ("srun -N 2 -n 8 python t.py", 2, 4),
        ("srun --nodes=2-4 --ntasks-per-node=4 python t.py", 2, 4),
        ("srun -n 8 --ntasks-per-node=4 python t.py", 2, 4),
        ("srun -w a,b --ntasks-per-node=4 python t.py", 2, 4),
        ("srun -N2 torchrun --nnodes 2 --nproc_per_node 4 t.py", 2, 4),
        ("mpirun -np 4 -npernode 2 python t.py", 2, 2),
        ("accelerate launch --num_machines 2 --num_processes 16 t.py", 2, 8),
        ("deepspeed --num_nodes 2 --num_gpus 4 t.py", 2, 4),
    ],
)
def test_a_script_without_a_job_has_the_nodes_and_ranks_that_its_line_starts(
    tmp_path: Path, command: str, nodes: int, per_node: int
) -> None:
    found = imported(tmp_path, f"#!/bin/bash\nmodule load cuda\n{command}\n", kind="slurm")
    resources = found.resolved.job.resources
    assert (resources.nodes, resources.ranks_per_node) == (nodes, per_node)
    assert not [each for each in found.left if each.why == "resources decides how many ranks are where"]


def test_what_srun_asks_slurm_for_without_a_job_becomes_the_job(tmp_path: Path) -> None:
    line = "srun -p gpu -A vision -N2 --ntasks-per-node=4 --gres=gpu:4 -c 8 -t 1:00:00 --mem=64G -l python t.py\n"
    options = choose_options(imported(tmp_path, line, kind="slurm").resolved.job, {}).sbatch
    wanted = {
        "partition": "gpu", "account": "vision", "nodes": "2", "ntasks_per_node": "4", "gres": "gpu:4",
        "cpus_per_task": "8", "time": "1:00:00", "mem": "64G",
    }  # fmt: skip
    assert {name: options[name] for name in wanted} == wanted


@pytest.mark.parametrize("line", ["mpirun -H a:2,b:2 python t.py", "deepspeed --hostfile hosts t.py"])
def test_hosts_of_a_line_are_refused_with_the_option_of_submit_that_takes_them(tmp_path: Path, line: str) -> None:
    with pytest.raises(UsageError, match="clusterddp submit --hosts LIST or --hostfile FILE takes"):
        imported(tmp_path, f"{line}\n", kind="slurm")


@pytest.mark.parametrize(
    ("job", "command", "nodes", "listed"),
    [
        ("-N 4", "srun -N 2 python t.py", 2, ("#SBATCH -N 4", "srun -N 2 (line 2) starts ranks on 2: the spec has 2")),
        (
            "-N 4",
            "srun torchrun --nnodes 2 t.py",
            2,
            ("#SBATCH -N 4", "torchrun --nnodes 2 (line 2) starts ranks on 2"),
        ),
        ("-N 2", "mpirun -H a:2,b:2 python t.py", 2, ("mpirun -H a:2,b:2", "in a job Slurm chooses the hosts")),
        ("-N 2", "srun torchrun t.py", 2, ("srun torchrun t.py", "torchrun without --nnodes starts a world on each")),
        ("-N 2 --ntasks-per-node=4", "srun -n 4 python t.py", 2, ("srun -n 4 python t.py", "this line starts 2")),
        ("-N 2", "mpirun -np 5 python t.py", 2, ("mpirun -np 5 python t.py", "5 ranks do not divide by 2 nodes")),
    ],
)
def test_contradictions_between_the_job_and_the_line_are_listed(
    tmp_path: Path, job: str, command: str, nodes: int, listed: tuple[str, str]
) -> None:
    found = imported(tmp_path, f"#SBATCH {job}\n{command}\n")
    assert found.resolved.job.resources.nodes == nodes
    text, why = listed
    assert [each for each in found.left if each.text == text and why in each.why], found.left


def test_a_job_that_names_its_nodes_and_not_their_number_has_all_of_them(tmp_path: Path) -> None:
    options = asked(tmp_path, "#SBATCH -w node[1-3]\nsrun python t.py\n")
    assert (options["nodes"], options["nodelist"]) == ("3", "node[1-3]")


G = "#!/bin/bash\n#SBATCH --gres=gpu:1\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (G + "source settings.sh\nconda activate torch\npython train.py\n", ["only known kinds", "install it there"]),
        ("#SBATCH --nodes=1 --ntasks=16 --gres=gpu:1\npython train.py\n", {"resources.cpus_per_task": 16}),
        (G + "#SBATCH --array=0-99\npython worker.py --total 100\n", ["the spec runs one task of it"]),
        (G + "#SBATCH --requeue\nsrun python train.py\n", ["restarts: N"]),
        (G + "#SBATCH --signal=USR1@600\nsrun python train.py\n", ["stop.lead", "entry.stop_signal"]),
        ("#SBATCH --gres=gpu:4 --ntasks=1\n/opt/nlp/bin/torchrun --nproc_per_node=4 train.py\n", ["submit with it"]),
        (G + "#SBATCH --chdir=/home/me/project\npython train.py\n", ["submit from there"]),
        (
            "#SBATCH --nodes=2 --ntasks-per-node=4 --gres=gpu:4\nmpirun python train_hvd.py\n",
            ["slurm.mpi: pmix"],
        ),
        (G + "unset PYTHONPATH LD_PRELOAD\nsrun python train.py\n", ["in the shell that submits"]),
        (G + "#SBATCH --dependency=singleton\nsrun python train.py\n", ["after: [RUN]"]),
        (G + "#SBATCH --mail-type=BEGIN\n#SBATCH --mail-type=FAIL\npython t.py\n", {"slurm.mail_type": "BEGIN,FAIL"}),
        ("#SBATCH --gres=gpu:1 --mem=64gb\n#SBATCH --time=2880\npython train.py\n", {"resources.memory_gb": 64}),
        (
            "#SBATCH --gres=gpu:1\nsrun --container-workdir=/w python train.py\n",
            ["the script has no image on this line"],
        ),
        (G + "python -m pip install -r r.txt\npython train.py\n", {"entry.script": "train.py"}),
        (
            G + "srun singularity run --nv img.sif python train.py\n",
            {"entry.command": ["singularity", "run", "--nv", "img.sif", "python", "train.py"]},
        ),
        (G + 'if [ "$DEBUG" = 1 ]; then\n  EPOCHS=1\nfi\nsrun python train.py\n', "train.slurm:3: "),
        ("#SBATCH --nodes=2 --gres=gpu:4\nmpirun -np $((2 * 4)) python train.py\n", "train.slurm:2: "),
        (G + "export HF_TOKEN=hf_abcdefghijklmnop\npython train.py --token $HF_TOKEN\n", "train.slurm:4: "),
        (G + 'read -ra A <<< "$LIST"\nsrun python train.py\n', "train.slurm:3: "),
        (G + "python -m pip install -r r.txt\nllamafactory-cli train config.yaml\n", "no plain command"),
        (G + "seed=0\nfor seed in 1 2 3; do\n  python train.py --seed $seed\ndone\n", "train.slurm:4: "),
        (G + "RANK=16\npython train.py --lora_rank $RANK\n", "train.slurm:4: "),
        (G + "python train.py < cfg.txt\n", "train.slurm:3: "),
        (G + "python train.py --sep $'\\t'\n", "train.slurm:3: "),
        (G + 'B=32\npython train.py --data $HOME/data --bs $((B * 4)) "$@"\n', "train.slurm:4: "),
        (
            G + 'singularity exec --nv --env A=1 img.sif bash -c "source /ext3/env.sh; python train.py"\n',
            "no plain command",
        ),
        (
            "#SBATCH --gres=gpu:8 --ntasks=1\naccelerate launch --config_file fsdp.yaml --num_processes 8 train.py\n",
            "train plain DDP",
        ),
        (G + 'CMD="python train.py --lr 0.1"\neval $CMD\n', "train.slurm:4: "),
        (G + "srun --container-image=$PWD/img.sqsh python train.py\n", "train.slurm:3: "),
        ("sbatch <<EOF\n#!/bin/bash\n#SBATCH --gres=gpu:2\nsrun python train.py\nEOF\n", "train.slurm:1: "),
    ],
)
def test_what_real_scripts_hold_is_kept_or_noted_or_refused(
    tmp_path: Path, text: str, expected: str | list[str] | dict[str, Any]
) -> None:
    """A text: it is refused with it; a list: notes say it; a mapping: the spec has it."""
    if isinstance(expected, str):
        with pytest.raises(UsageError) as caught:
            imported(tmp_path, text)
        assert expected in caught.value.message
    elif isinstance(expected, list):
        whys = " ".join(each.why for each in imported(tmp_path, text).left if each.fate != "ours")
        assert [part for part in expected if part not in whys] == []
    else:
        found = values(tmp_path, text)
        assert {key: found.get(key) for key in expected} == expected
