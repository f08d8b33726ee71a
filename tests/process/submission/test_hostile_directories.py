"""Each command in a directory with a stranger's run: nothing starts, nothing else changes, one's own runs are shown."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile_runs import NAME, PLANTS, Trap, plant_run
from tests.support.waiting import PATIENCE, wait_until

LIMIT_S = 10 * PATIENCE
LOOKS = [
    "list --wide",
    "status RUN -o json",
    "status",
    "logs RUN --since 1h --timestamps",
    "report RUN --out -",
    "compare RUN MINE",
    "dash RUN",
    "rm RUN -n",
    "resume RUN --from-start",
]
"""What reads each file of a run."""
OTHERS = [
    "list -o json",
    "status RUN",
    "status @last",
    "logs RUN --rank all",
    "logs RUN --tail 3",
    "report RUN MINE --out -",
    "stacks RUN --timeout 1",
    "ps",
    "gc -n",
    "rm --state failed -n",
    "wait RUN --timeout 0",
    "exec RUN -- true",
    "submit RUN",
    "cancel RUN",
    "cancel RUN --save",
    "gc -n --older-than 1d",
]
EACH_IN_A_CHILD = """
import http.client, importlib, json, os, pathlib, pkgutil, resource, signal, sys, threading
import clusterddp
from clusterddp.cli.dash import DashServer
from clusterddp.cli.main import main

for module in pkgutil.walk_packages(clusterddp.__path__, "clusterddp."):
    if module.name.split(".")[1] in ("cli", "view"):
        importlib.import_module(module.name)  # once, for all children

def hear(event, arguments):
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system"):
        os.write(3, f"{event} {arguments!r:.300}\\n".encode())
    if event == "socket.connect" and isinstance(arguments[1], tuple) and arguments[1] != ask_dash.address:
        os.write(3, f"{event} {arguments[1]!r}\\n".encode())

def ask_dash(run):
    server = DashServer(pathlib.Path("runs"), port=0, environ=dict(os.environ))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ask_dash.address = server.server_address
    for path in ("/", f"/run?run={run}", f"/bytes?run={run}&rank=0"):
        connection = http.client.HTTPConnection(*server.server_address)
        connection.request("GET", path, headers={"X-Clusterddp-Key": server.key})
        print(path, connection.getresponse().read().decode(errors="replace"))
    return 0

ask_dash.address = None

limit_s, commands = json.loads(sys.argv[1])
for number, argv in enumerate(commands):
    pid = os.fork()
    if pid == 0:
        out = os.open(f"{sys.argv[2]}/{number}.out", os.O_CREAT | os.O_WRONLY, 0o600)
        heard = os.open(f"{sys.argv[2]}/{number}.heard", os.O_CREAT | os.O_WRONLY, 0o600)
        os.dup2(out, 1); os.dup2(out, 2); os.dup2(heard, 3)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
        signal.alarm(limit_s)
        sys.addaudithook(hear)
        code = ask_dash(argv[1]) if argv[0] == "dash" else main(argv)
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Trap:
    """A user's home and project, with one run of the user's own that has ended."""
    place = tmp_path_factory.mktemp("hostile")
    trap = Trap(home=place / "home", project=place / "project", sprung=place / "sprung")
    for directory in (trap.home / "app", trap.project):
        directory.mkdir(parents=True)
    trap.make_programs()
    (trap.home / "app" / "secrets.json").write_text('{"key": "the reader\'s"}')
    (trap.home / "app" / "notes.jsonl").write_text('{"event": "note"}\n')
    (trap.project / "train.py").write_text("print('hello from mine')\n")
    (trap.project / "job.yaml").write_text("name: mine\nentry: {script: train.py}\n")
    done = subprocess.run(
        [sys.executable, "-m", "clusterddp", "submit", "job.yaml", "--wait"],
        cwd=trap.project,
        env=environment(trap),
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wait_until((trap.runs / own_run(trap) / "report.html").is_file)  # a process of the run writes it after its end
    return trap


def environment(trap: Trap) -> dict[str, str]:
    # Nobody's shell has them; the other variables are the user's.
    own = {name: value for name, value in os.environ.items() if not name.startswith(("CLUSTERDDP_", "XDG_", "SLURM_"))}
    return own | {"HOME": str(trap.home), "PATH": f"{trap.programs}:{os.environ['PATH']}"}


def own_run(trap: Trap) -> str:
    (name,) = [path.name for path in trap.runs.iterdir() if not path.name.startswith(".") and path.name != NAME]
    return name


def look_at(trap: Trap, commands: list[list[str]], place: Path) -> list[tuple[int, str, str]]:
    """Run each command in a process of its own; return its code, what it said, and what it started or connected to."""
    argv = [sys.executable, "-c", EACH_IN_A_CHILD, json.dumps([LIMIT_S, commands]), str(place)]
    # -P, since the test itself must not import what was planted in the project.
    env = environment(trap) | {"PYTHONPATH": str(Path(__file__).parents[3]), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(argv, cwd=trap.project, env=env, capture_output=True, text=True, check=True, timeout=500)
    return [
        (int(code), *((place / f"{number}.{kind}").read_text(errors="replace") for kind in ("out", "heard")))
        for number, code in enumerate(done.stdout.split())
    ]


def state_of(*roots: Path, but: Path) -> dict[str, Any]:
    """Return what can change of all files below these directories, without the stranger's run."""
    found = {}
    for root in roots:
        for folder, directories, files in os.walk(root):
            directories[:] = [name for name in directories if Path(folder, name) != but and name != "__pycache__"]
            for path in (Path(folder, name) for name in [*directories, *files]):
                status = path.lstat()
                is_file = stat.S_ISREG(status.st_mode)
                found[str(path)] = (status.st_mode, (status.st_size, status.st_mtime_ns) if is_file else None)
    return found


@pytest.fixture
def cleaned(trap: Trap) -> Iterator[None]:
    """Remove afterwards what was planted."""
    before = {*trap.project.rglob("*"), *trap.runs.glob("*")}
    yield
    trap.sprung.unlink(missing_ok=True)
    for path in [*trap.runs.glob("*"), *trap.project.glob("*")]:
        if path not in before:
            path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path, ignore_errors=True)


@pytest.mark.usefixtures("cleaned")
@pytest.mark.parametrize("name", PLANTS)
def test_a_stranger_s_run_is_shown_and_never_obeyed(name: str, trap: Trap, tmp_path: Path) -> None:
    mine = own_run(trap)
    plant, more = PLANTS[name]
    planted = plant_run(trap, plant, more=more)
    before = state_of(trap.home, trap.project, but=planted.path)
    words = {"RUN": NAME, "MINE": mine}
    typed = LOOKS if name.startswith(("a FIFO", "3 GB")) else [*LOOKS, *OTHERS]
    commands = [[words.get(word, word) for word in command.split()] for command in typed]
    failures = []
    for argv, (code, said, heard) in zip(commands, look_at(trap, commands, tmp_path), strict=True):
        if code < 0 or "internal:" in said or heard:
            failures.append((argv, code, heard, said[-600:]))
        if argv[0] in ("list", "dash") and (code != 0 or mine not in said):
            failures.append((argv, code, "the own run is missing", said[-600:]))
        if argv[0] == "resume" and code == 0 and NAME in said:
            failures.append((argv, code, "resumed", said[-600:]))
    after = state_of(trap.home, trap.project, but=planted.path)
    changes = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert not trap.sprung.exists(), trap.sprung.read_text()
    assert not failures, "\n".join(map(str, failures))
    assert not changes


STRANGER, GROUP = 2002, 2003
KINDS = {"sticky": (0, 0o1777), "a group's": (0, 0o2770), "open": (0, 0o777), "a stranger's": (STRANGER, 0o755)}


@pytest.fixture
def shared(trap: Trap, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A runs directory into which a stranger has put a run, stores of code, and what looks like remains of ours."""
    owner, mode = KINDS[request.param]
    place = trap.project / "shared"
    place.mkdir()
    planted = plant_run(trap, PLANTS["a link to secrets"][0])
    planted.path.rename(place / NAME)
    for name in (".code", f".code-{os.getuid()}", ".removed-1", ".staging-1"):
        (place / name / "kept").mkdir(parents=True)
        (place / name).chmod(0o777)
        os.utime(place / name, (1, 1))
    for folder, names, files in os.walk(place):
        for each in (Path(folder, name) for name in [*names, *files]):
            os.chown(each, STRANGER, STRANGER, follow_symlinks=False)
    os.chown(place, owner, GROUP)
    place.chmod(mode)
    yield place
    shutil.rmtree(place)


def submit(trap: Trap, runs: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clusterddp", "submit", "job.yaml", "--wait", "--runs", str(runs)]
    env = environment(trap) | variables
    return subprocess.run(command, cwd=trap.project, env=env, capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.root
@pytest.mark.parametrize("shared", KINDS, indirect=True)
def test_a_directory_of_several_users_is_read_and_nothing_in_it_is_obeyed(
    shared: Path, trap: Trap, tmp_path: Path
) -> None:
    before = state_of(trap.home, trap.project, but=trap.runs)
    asked = [command.replace("RUN", NAME).split() for command in [*LOOKS, *OTHERS] if "MINE" not in command]
    commands = [[*argv, "--runs", "shared"] for argv in asked if argv[0] not in ("dash", "exec")]
    for argv, (code, said, heard) in zip(commands, look_at(trap, commands, tmp_path), strict=True):
        assert (code >= 0, "internal:" in said, heard) == (True, False, ""), (argv, said)
        if argv[0] == "list":
            assert (code, NAME in said) == (0, True)
    assert state_of(trap.home, trap.project, but=trap.runs) == before
    assert not trap.sprung.exists()


@pytest.mark.root
@pytest.mark.parametrize("shared", KINDS, indirect=True)
def test_a_run_is_started_only_where_no_stranger_can_replace_it(
    shared: Path, trap: Trap, request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.params["shared"]
    strangers = sorted(path.name for path in shared.iterdir())
    done = submit(trap, shared)
    if kind != "sticky":
        assert done.returncode == 1
        assert ("belongs to uid" if kind == "a stranger's" else f"chmod +t {shared}") in done.stderr
        assert sorted(path.name for path in shared.iterdir()) == strangers
        if kind == "a stranger's":
            done = submit(trap, shared, CLUSTERDDP_SAFE_DIRECTORIES=str(trap.project))
        else:
            shared.chmod(shared.stat().st_mode | 0o1000)
            done = submit(trap, shared)
    if done.returncode:  # a script needs the store of code, whose names the stranger has taken
        assert f"{shared}/.code-{os.getuid()} belongs to uid {STRANGER}, and has to be yours" in done.stderr
    assert {path.name for path in shared.iterdir()} >= set(strangers)
    assert not trap.sprung.exists()


@pytest.mark.root
def test_a_run_that_a_stranger_has_put_in_place_of_ones_own_is_not_resumed(trap: Trap, tmp_path: Path) -> None:
    place = trap.project / "swapped"
    assert submit(trap, place).returncode == 0
    (own,) = [path for path in place.iterdir() if not path.name.startswith(".")]
    own.rename(tmp_path / "away")
    planted = plant_run(trap, PLANTS["a program"][0])
    planted.path.rename(own)
    os.chown(own, STRANGER, STRANGER)
    commands = [
        ["resume", own.name, "--from-start", "--runs", "swapped"],
        ["exec", own.name, "true", "--runs", "swapped"],
    ]
    for code, said, heard in look_at(trap, commands, tmp_path):
        assert (code in (1, 2), heard) == (True, ""), said
        assert f"{own.name} belongs to" in said
    shutil.rmtree(place)
    assert not trap.sprung.exists()
