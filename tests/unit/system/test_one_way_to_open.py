"""What reads files of runs opens them by system/files.py: regular files only, no link, no wait for a pipe, bounded."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import clusterddp
from clusterddp.errors import ClusterddpError
from clusterddp.system.files import open_regular, read_last_jsonl, read_last_lines, read_regular

HOME = Path(clusterddp.__file__).parent
ROOMS = ("view", "run", "places", "cli", "planning", "submission")
ALLOWED = {
    "cli/help_.py": "pages of the package",
    "cli/init.py": "the user's own files: ssh's configuration",
    "cli/login_command.py": "the user's own configuration",
    "cli/submit.py": "the user's own script",
    "cli/page/drawing.py": "files of the package",
    "places/local/pretended_job.py": "the output file of the job, to write",
    "places/local/stand_ins.py": "in the job: what --input and --output of srun name, and the job's own sizes",
    "places/local/task.py": "/dev/null",
    "places/slurm/step_command.py": "in the job: /proc, the first line of programs, the meeting of its agents",
    "places/slurm/task.py": "a task imports as little as it can, and reads the plan of its own job",
    "places/ssh/agent/boot.py": "runs before the package is there",
    "places/ssh/agent/store.py": "the agent's own record, in its own directory",
    "places/ssh/config.py": "the user's own files: ssh's configuration",
    "places/ssh/download.py": "what this process has just written",
    "places/ssh/session.py": "files of the package",
    "places/ssh/transport.py": "the user's own files: keys",
    "planning/program.py": "the user's own files: .pth of this Python",
    "planning/python.py": "the user's own files: conda's list of environments",
    "run/code.py": "the user's own code, of which only regular files are chosen",
    "run/preload.py": "the user's own script, before it is submitted",
    "run/record.py": "/proc",
    "run/seal.py": "the user's own key, checked by owner and mode",
}
"""File -> why it opens files in another way."""


def opens_to_read(node: ast.Call) -> bool:
    """Return whether a call opens a file to read it, or reads one, in a way of its own."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    text = ast.unparse(node)
    if name in ("read_text", "read_bytes"):
        return True
    if name != "open":
        return False
    if text.startswith("os.open("):
        return not any(flag in text for flag in ("O_WRONLY", "O_RDWR", "O_DIRECTORY"))
    modes = [word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
    if isinstance(node.func, ast.Name):
        return not modes or "r" in modes[-1]
    return bool(modes and "r" in modes[-1]) or any(word.arg in ("encoding", "mode") for word in node.keywords)


def found_in(path: Path) -> list[int]:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if opens_to_read(call)]


def test_no_other_file_opens_the_files_of_a_run_in_a_way_of_its_own() -> None:
    files = {path.relative_to(HOME).as_posix(): path for room in ROOMS for path in (HOME / room).rglob("*.py")}
    found = {name: lines for name, path in files.items() if (lines := found_in(path))}
    assert {name: lines for name, lines in found.items() if name not in ALLOWED} == {}
    assert sorted(ALLOWED.keys() - found.keys()) == []


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_directory(path: Path) -> None:
    path.mkdir()


def make_link(path: Path) -> None:
    path.with_name("target").write_text("{}\n")
    path.symlink_to("target")


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("make", [make_pipe, make_directory, make_link, make_loop])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, make: object) -> None:
    path = tmp_path / "metrics.jsonl"
    make(path)  # type: ignore[operator]
    for read in (open_regular, lambda path: read_regular(path, 10), lambda path: read_last_lines(path, 10)):
        with pytest.raises(ClusterddpError, match=r"metrics\.jsonl: is not a regular file"):
            read(path)


def test_a_giant_file_is_refused_unread_and_its_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "a"}\n')
    os.truncate(path, 3 << 30)
    with path.open("ab") as file:
        file.write(b'\n{"event": "b"}\n')
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))\n"
        "from pathlib import Path; from clusterddp.system.files import read_json, read_last_jsonl\n"
        "from clusterddp.errors import ClusterddpError\n"
        "path = Path(sys.argv[1]); print(read_last_jsonl(path, 1 << 24))\n"
        "try: read_json(path)\n"
        "except ClusterddpError as error: print(error.message.partition(': ')[2])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "[{'event': 'b'}]\nhas more than 67,108,864 bytes\n", done.stderr


def test_a_line_that_is_too_long_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "%s"}\n{"event": "b"}\n' % ("a" * (1 << 20)))
    assert read_last_jsonl(path, 1 << 24) == [{"event": "b"}]
