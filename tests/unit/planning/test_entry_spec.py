"""The entry section: its keys, and the problems that are found before a start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import SpecError, UsageError
from clusterddp.ranks.environment import (
    VARIABLES,
    entry_environment,
    fill_in,
    find_placeholders,
    init_method,
    placeholder_values,
)
from clusterddp.spec.load import load_spec
from clusterddp.spec.model import JobSpec
from clusterddp.spec.yamlfile import resolved_yaml
from tests.support.launch_runs import plan_text


def load(entry: str, more: str = "") -> JobSpec:
    return load_spec(f"name: a\nentry: {entry}\n{more}\n", environ={}).job


def problems(entry: str, more: str = "") -> list[tuple[str, str]]:
    with pytest.raises(SpecError) as raised:
        load(entry, more)
    return [(problem.key, problem.message) for problem in raised.value.problems]


@pytest.mark.parametrize(
    ("entry", "key", "message"),
    [
        ("{script: a.py, args: ['{rnak}']}", "entry.args.0", 'unknown placeholder {rnak}. Did you mean "rank"?'),
        ("{command: 'a {wrld_size}'}", "entry.command", 'unknown placeholder {wrld_size}. Did you mean "world_size"?'),
        ("{command: [a, '{x}']}", "entry.command.1", "unknown placeholder {x}"),
        ("{function: 'a:b', kwargs: {o: [{p: '{x}'}]}}", "entry.kwargs.o", "unknown placeholder {x}"),
        ("{script: a.py, args: ['{data_dir}']}", "entry.args.0", "{data_dir} has no value"),
        ("{script: a.py, args: ['{local_rank}'], owns_ranks: true}", "entry.args.0", "{local_rank} has no value: the "
         "program starts its ranks itself"),
        ("{command: 'echo {rank}', shell: true}", "entry.command", "{rank} stays as it is in text for a shell"),
        ("{command: [echo, a], shell: true}", "entry.shell", "a shell reads text, found a list of words"),
        ("{script: a.py, shell: true}", "entry.shell", "a shell reads text, found no command"),
        ("{script: a.py, kwargs: {a: 1}}", "entry.kwargs", "is for a function, and there is none"),
        ("{script: a.py, stop_signal: TERM}", "entry.stop_signal", "is for a command"),
        ("{command: 'a \"b'}", "entry.command", 'found the text "a \\"b", expected words that a shell can split (no '
         "closing quotation)"),
        ("{command: []}", "entry.command", "found a list, expected a program and its arguments"),
        ("{function: a.b.c}", "entry.function", 'found "a.b.c", expected package.module:function or '
         "path/file.py:function"),
        ("{function: 'a:b', args: [.nan]}", "entry.args.0", None),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_entry_is_reported_at_its_place(entry: str, key: str, message: str | None) -> None:
    if message is None:
        assert load(entry).entry is not None  # text, as ever where YAML 1.2 knows no number
        return
    assert problems(entry) == [(key, message)]


def test_ranks_on_hosts_that_share_nothing_cannot_meet_by_a_file() -> None:
    more = "launcher: ssh\nssh: {hosts: [a, b]}\nnetwork: {init: file}"
    message = "file needs a directory that all ranks share, and hosts over SSH share none"
    assert problems("{script: a.py}", more) == [("network.init", message)]


@pytest.mark.parametrize(
    "entry",
    [
        '{function: "a.b:C.d", args: [1, "1", 1e-3, "1e-3", null, true, "true", {a: [2.5]}], kwargs: {s: "null"}}',
        '{function: "/x y/a-b.py:c"}',
        '{command: "python x.py \\"a b\\""}',
        '{command: [python, 1, "a b", 1e-3]}',
        '{command: "a && b", shell: true, args: ["{rank}", 007]}',
        "{script: x.py, owns_ranks: true, world_size: processes, data_dir: d, output_dir: o}",
    ],
)
def test_an_entry_that_is_written_reads_back_the_same(entry: str) -> None:
    job = load(entry)
    assert load_spec(resolved_yaml(job), environ={}).job == job


def test_a_functions_arguments_are_values_and_a_programs_are_words() -> None:
    function, script = load('{function: "a:b", args: [1, 0.10, "1"]}'), load('{script: a.py, args: [1, 0.10, "1"]}')
    assert function.entry is not None
    assert script.entry is not None
    assert (function.entry.args, script.entry.args) == ((1, 0.1, "1"), ("1", "0.10", "1"))


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("--rank={rank}", "--rank=3"),
        ("{rank}{rank}", "33"),
        ("{{rank}}", "{rank}"),
        ("{{{rank}}}", "{{rank}}"),
        ("${rank} ${RANK}", "${rank} ${RANK}"),
        ('{"rank": {}} {} {a,b} {0}', '{"rank": {}} {} {a,b} {0}'),
        ("{unknown}", "{unknown}"),
    ],
)
def test_placeholders_are_filled_in_and_other_braces_left_alone(text: str, filled: str) -> None:
    assert fill_in(text, {"rank": "3"}) == filled


def test_what_is_escaped_is_no_placeholder() -> None:
    assert list(find_placeholders("{{a}} ${b} {c} {D} {d}")) == ["c", "d"]


@pytest.mark.parametrize(
    ("init", "address", "expected"),
    [
        ("tcp", "10.0.0.1", "tcp://10.0.0.1:29500"),
        ("tcp", "fd00::1", "tcp://[fd00::1]:29500"),
        ("env", "10.0.0.1", "env://"),
        ("file", "10.0.0.1", "file:///runs/r/attempts/2/rendezvous"),
    ],
)
def test_ranks_get_the_address_at_which_they_meet(init: Any, address: str, expected: str) -> None:
    run = {"CLUSTERDDP_RUN_DIR": "/runs/r", "CLUSTERDDP_ATTEMPT": "2"}
    assert init_method(init, run | {"MASTER_ADDR": address, "MASTER_PORT": "29500"}) == expected


def test_a_program_that_owns_unequal_numbers_of_ranks_gets_its_first_rank() -> None:
    environ = {"NODE_RANK": "2", "RANK": "2", "WORLD_SIZE": "3"}
    changes = entry_environment(environ, init="env", spawns=(4, 8, 2), counts="processes")
    assert [changes[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == ["12", "14", "2"]


def test_torchruns_own_variables_are_enough_for_the_placeholders_of_a_rank() -> None:
    of_torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
    values = placeholder_values(of_torchrun | {"GROUP_WORLD_SIZE": "2"}, "machines")
    assert [values[name] for name in ("rank", "world_size", "node_rank", "num_nodes")] == ["1", "2", "1", "2"]
    assert values.keys() == VARIABLES.keys()


def test_a_runs_directory_that_no_address_can_hold_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a#b").mkdir()
    with pytest.raises(UsageError, match="which ends a path in a file:// address"):
        plan_text("name: a\nentry: {command: ls}\nnetwork: {init: file}\n", tmp_path / "a#b")


FOUR_RANKS = "resources: {nodes: 2, procs_per_node: 2}"


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ("{command: torchrun --nproc-per-node 2 train.py}", "torchrun"),
        ("{command: [/opt/env/bin/torchrun, train.py]}", "torchrun"),
        ("{command: [mpirun, -n, 4, python, train.py]}", "mpirun"),
        ("{command: mpiexec python train.py}", "mpiexec"),
        ("{command: accelerate launch train.py}", "accelerate launch"),
        ("{command: deepspeed train.py}", "deepspeed"),
        ("{command: uv run --frozen torchrun train.py}", "torchrun"),
        ("{command: python3 -m torch.distributed.run train.py}", "torch.distributed.run"),
        ("{command: 'bash -c \"cd src; torchrun train.py\"'}", "torchrun"),
        ("{command: 'cd src && exec torchrun train.py', shell: true}", "torchrun"),
        ('{command: "ulimit -c 0 # more\\nA=1 env B=2 \\\\\\n torchrun train.py", shell: true}', "torchrun"),
        ("{command: 'if true; then srun python train.py; fi', shell: true}", "srun"),
        ("{command: uv run --with lightning --frozen torchrun train.py}", "torchrun"),
        ("{command: env -u B A=1 CUDA=2 timeout -k 5 1h nice -n 10 torchrun train.py}", "torchrun"),
        ("{command: conda run -n torch --no-capture-output accelerate launch train.py}", "accelerate launch"),
        ("{command: poetry -C lab run deepspeed train.py}", "deepspeed"),
        (
            "{command: pixi run -e gpu python -W ignore -m accelerate.commands.launch train.py}",
            "accelerate.commands.launch",
        ),
        ("{command: numactl --cpunodebind 0 taskset -c 0-3 stdbuf -oL horovodrun -np 2 python train.py}", "horovodrun"),
        ("{command: apptainer exec --nv -B /data torch.sif torchrun train.py}", "torchrun"),
        ("{command: [bash, -euo, pipefail, -c, torchrun train.py]}", "torchrun"),
        ("{command: tune run lora.py}", "tune run"),
        ("{command: lightning run model train.py}", "lightning run"),
        ("{command: python -u /opt/env/bin/torchrun train.py}", "torchrun"),
        ("{command: 'timeout 1h bash -lc \"env -u A torchrun train.py\"'}", "torchrun"),
        ("{command: 'env -u A torchrun train.py', shell: true}", "torchrun"),
    ],
)
def test_a_launcher_in_each_rank_is_refused_with_its_name(entry: str, name: str) -> None:
    found = problems(entry, FOUR_RANKS)
    assert found == [("entry.command", f"each of the 4 ranks would start {name}, which starts ranks itself")]


@pytest.mark.parametrize(
    ("key", "entry", "name"),
    [
        (
            "entry.module",
            "{module: torch.distributed.run, args: [--nproc-per-node, 2, train.py]}",
            "torch.distributed.run",
        ),
        ("entry.module", "{module: accelerate.commands.launch, args: [train.py]}", "accelerate.commands.launch"),
        ("entry.script", "{script: /opt/env/bin/torchrun, args: [train.py]}", "torchrun"),
        ("entry.function", "{function: 'torch.distributed.run:main'}", "torch.distributed.run"),
    ],
)
def test_a_launcher_that_is_the_program_itself_is_refused_at_its_key(key: str, entry: str, name: str) -> None:
    assert problems(entry, FOUR_RANKS) == [(key, f"each of the 4 ranks would start {name}, which starts ranks itself")]


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        ("torchrun --nnodes 2 --nproc-per-node=2 train.py --lr 0.1", "entry: {script: train.py, args: [--lr, 0.1]}"),
        ("torchrun --nproc-per-node 2 -m lab.train", "entry: {module: lab.train}"),
        ("python -m torch.distributed.run train.py", "entry: {script: train.py}"),
        ("srun -n 4 python -u train.py 'a b'", 'entry: {script: train.py, args: ["a b"]}'),
        ("mpirun -np 4 -x PATH python train.py", "entry: {script: train.py}"),
        ("srun -n 4 ./solve --fast", "entry: {command: [./solve, --fast]}"),
        (
            "accelerate launch --multi_gpu --config_file fsdp.yaml train.py --lr 0.1",
            "entry: {script: train.py, args: [--lr, 0.1]}",
        ),
        ("tune run lora", "leave tune run out"),
        ("deepspeed", "leave deepspeed out"),
        ("torchrun --odd value train.py", "entry: {script: train.py}"),
    ],
)
def test_a_refused_launcher_gets_the_two_ways_to_write_it(command: str, instead: str) -> None:
    with pytest.raises(SpecError) as error:
        load(f"{{command: {json.dumps(command)}}}", FOUR_RANKS)
    (problem,) = error.value.problems
    hint = str(problem.hint)
    way = f"write {instead}" if instead.startswith("entry") else instead
    assert hint.startswith(
        f"{way}, and every rank runs it with torchrun's variables; or owns_ranks: true, and each node "
    )
    if instead.startswith("entry"):
        load(instead.removeprefix("entry: "), FOUR_RANKS)


@pytest.mark.parametrize(
    ("entry", "more"),
    [
        ("{command: torchrun train.py, owns_ranks: true}", FOUR_RANKS),
        ("{command: torchrun --nproc-per-node 2 train.py}", ""),
        ("{command: python torchrun.py torchrun}", FOUR_RANKS),
        ("{command: python train.py -m torch.distributed.run}", FOUR_RANKS),
        ("{command: timeout 1h python train.py torchrun}", FOUR_RANKS),
        ("{command: uv run train.py --launcher torchrun}", FOUR_RANKS),
        ("{command: lightning fit torchrun}", FOUR_RANKS),
        ("{module: torch.utils.collect_env}", FOUR_RANKS),
        ("{script: torchrun.py}", FOUR_RANKS),
        ("{command: accelerate env}", FOUR_RANKS),
        ("{command: 'echo torchrun', shell: true}", FOUR_RANKS),
        ("{command: 'echo \"a; torchrun b\" && python train.py # srun', shell: true}", FOUR_RANKS),
        ('{command: "cat <<E\\nsrun is no command here\\nE", shell: true}', FOUR_RANKS),
        ("{command: srun --overlap nvidia-smi, owns_ranks: true}", f"launcher: slurm\n{FOUR_RANKS}"),
        ("{command: srun python train.py}", "launcher: local"),
    ],
)
def test_a_launcher_where_it_can_work_is_accepted(entry: str, more: str) -> None:
    assert load(entry, more).entry is not None


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("./run.sh 2", "#!/bin/bash\nset -e\nexport A=1\ncd src\ntorchrun --nproc-per-node 2 train.py\n"),
        ("bash -euo pipefail run.sh -c 2", "module load cuda && exec env -u A torchrun train.py"),
        ("timeout 1h ./run.sh", "#!/usr/bin/env bash\ntorchrun train.py \\\n  --lr 0.1\n"),
    ],
)
def test_a_script_that_starts_a_launcher_in_each_rank_is_refused_at_the_command(
    tmp_path: Path, command: str, text: str
) -> None:
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(SpecError) as raised:
        plan_text(f"name: a\nentry:\n  command: {command}\n{FOUR_RANKS}\n", tmp_path)
    (problem,) = raised.value.problems
    file = "./run.sh" if "./run" in command else "run.sh"
    assert problem.message == f"{file}: each of the 4 ranks would start torchrun, which starts ranks itself"
    assert (problem.key, problem.line, problem.column) == ("entry.command", 3, 12)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ("{command: ./run.sh, owns_ranks: true}", "#!/bin/sh\ntorchrun train.py\n"),
        ("{command: ./run.sh}", '#!/bin/sh\nif [ -z "$RANK" ]; then\n  torchrun train.py\nfi\npython train.py\n'),
        ("{command: ./run.sh}", '#!/bin/sh\n[ -n "$RANK" ] || torchrun train.py\n'),
        ("{command: ./run.sh}", "#!/usr/bin/python\ntorchrun = 1\n"),
        ("{command: bash away.sh}", ""),
    ],
)
def test_a_script_that_may_start_no_launcher_is_accepted(tmp_path: Path, entry: str, text: str) -> None:
    (tmp_path / "run.sh").write_text(text)
    assert plan_text(f"name: a\nentry: {entry}\n{FOUR_RANKS}\n", tmp_path).gang.num_ranks == 4


@pytest.mark.parametrize("entry", ["{command: srun python train.py}", "{command: srun ls, owns_ranks: true}"])
def test_srun_within_a_step_of_slurm_is_refused(entry: str) -> None:
    message = "srun in a rank waits until the time limit: the ranks have all cores of the job"
    assert problems(entry, "launcher: slurm") == [("entry.command", message)]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("module load cuda && exec python train.py", "module"),
        ("ml cuda; python train.py", "ml"),
        ("set -e; conda activate torch; python train.py", "conda activate"),
        ("spack load cuda && python train.py", "spack load"),
    ],
)
def test_a_function_of_a_login_shell_is_refused_in_a_job(text: str, name: str) -> None:
    found = problems(f"{{command: '{text}', shell: true}}", "launcher: slurm")
    assert found == [
        ("entry.command", f"the /bin/sh of a rank does not know {name}: it reads no file of a login shell")
    ]


@pytest.mark.parametrize(
    ("text", "more"),
    [
        (". /etc/profile.d/modules.sh && module load cuda && exec python train.py", "launcher: slurm"),
        ('eval "$(conda shell.posix hook)" && conda activate torch', "launcher: slurm"),
        ("module load cuda && exec python train.py", "launcher: local"),
        ('bash -lc "module load cuda; exec python train.py"', "launcher: slurm"),
        ("conda run -n torch python train.py", "launcher: slurm"),
        ("module load cuda", "launcher: slurm\ncontainer: {image: a.sif, runtime: apptainer}"),
    ],
)
def test_a_function_of_a_shell_that_may_be_there_is_accepted(text: str, more: str) -> None:
    assert load(f"{{command: '{text}', shell: true}}", more).entry is not None
