"""A command of clusterddp on this login node, for a laptop whose own ssh runs it; the boot hands over the order.

order: {"arguments": [str or {"file": name}], "variables": the same by name, "runs_dir": str, "needs": [str],
        "files": {name: text}, "code": {"sum": str or null, "at": str, "within": str, "git": any,
                                         "import_paths": [str]} or null, "discard": bool}

The first answer, `{"missing": [str], "python": str, "send": bool}`, has the packages of `needs` that are not here.
After `"send": true` the laptop sends `{"size": n}` and n bytes, the archive of the code, which is answered, too. All
further output is the command's. A line on standard input is the user's Ctrl-C. When the connection ends, the command
has 120 s to finish: sbatch waits for a busy controller.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from clusterddp.errors import ClusterddpError
from clusterddp.places.ssh.agent.operations import Body, Host
from clusterddp.places.ssh.agent.store import find_code, lacks_code, put, refusing_disk
from clusterddp.ranks.environment import inherited_environment
from clusterddp.run.code import FOLDER, RECORD, TREE, link_or_copy
from clusterddp.run.removal import keep_package
from clusterddp.system.file_set import list_files
from clusterddp.system.files import write_json, write_text
from clusterddp.system.python import code_command, module_command

_GRACE_S = 120.0
_FIND_MISSING = """\
import sys
from importlib.metadata import PackageNotFoundError, version
def numbers(text):
    return [int(part) if part.isdigit() else 0 for part in text.split(".")[:3]]
for need in sys.argv[1:]:
    name, _, versions = need.partition(">=")
    try:
        if numbers(version(name)) < numbers(versions.partition(",")[0]):
            print(need)
    except PackageNotFoundError:
        print(need)
"""
"""Prints which requirements (`pydantic>=2.7,<3`) are not met, packages in the user's home included."""


def run(root: str, package: str, order: dict[str, Any]) -> NoReturn:
    """Run the command of an order, and leave with its exit code."""
    host = Host(root=Path(root), package=Path(package), patience_s=0)
    place = None
    try:
        try:
            environment = _environment(host, order["runs_dir"])
            place, cwd = _prepare(host, order, environment)
        except (ClusterddpError, OSError) as error:
            known = error if isinstance(error, ClusterddpError) else ClusterddpError(str(error))
            _say({"ok": False, "error": known.message, "hint": known.hint})
            code = 1
        else:
            environment |= {name: _spell(value, place) for name, value in order["variables"].items()}
            argv = module_command("clusterddp", *(_spell(each, place) for each in order["arguments"]))
            child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, env=environment, cwd=cwd, start_new_session=True)
            threading.Thread(target=_listen, args=(child,), daemon=True).start()
            code = child.wait()
    finally:
        if order["discard"] and place is not None:
            shutil.rmtree(place, ignore_errors=True)
    os._exit(code if code >= 0 else 128 - code)  # a thread still reads from the laptop; a normal exit waits for it


def main(arguments: list[str]) -> NoReturn:
    """Become a command that has the streams of this process: runs_dir, variables as JSON, its arguments."""
    runs_dir, variables, *words = arguments
    host = Host(root=Path(), package=Path(__file__).resolve().parents[2], patience_s=0)
    environment = _environment(host, runs_dir) | json.loads(variables)
    os.chdir(Path.home())
    os.execve(sys.executable, module_command("clusterddp", *words), environment)


def _environment(host: Host, runs_dir: str) -> dict[str, str]:
    inherited = inherited_environment()
    runs = str(Path(runs_dir).expanduser())
    return inherited | {"CLUSTERDDP_RUNS": runs, "PYTHONPATH": host.python_path(inherited)}


def _prepare(host: Host, order: dict[str, Any], environment: dict[str, str]) -> tuple[Path | None, Path]:
    """Check what is here, receive the code, lay it out; return its place, and the command's working directory."""
    code = order["code"]
    asked = code_command(_FIND_MISSING, *order["needs"])
    lacking = subprocess.run(asked, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    send = not lacking and code is not None and code["sum"] is not None
    send = send and lacks_code(host, code["sum"])
    _say({"ok": True, "missing": lacking, "python": sys.executable, "send": send})
    if lacking:
        sys.exit(1)
    if send:
        body = Body(sys.stdin.buffer, json.loads(sys.stdin.buffer.readline())["size"])
        put(host, {"sum": code["sum"], "target": None}, body)
        body.drain()
        _say({"ok": True})
    if code is None:
        return None, Path.home()
    return _lay_out(host, code, order["files"])


def _lay_out(host: Host, code: dict[str, Any], texts: dict[str, str]) -> tuple[Path, Path]:
    """Make a directory for a command: a copy of the code in its tree, the files beside the tree.

    Jobs import this package when they start, so gc keeps it from now on.
    """
    trees = host.root / FOLDER
    place = trees / secrets.token_hex(6)
    at, within = place / TREE / _below(code["at"]), place / TREE / _below(code["within"])
    with refusing_disk(trees, 0):
        at.mkdir(mode=0o700, parents=True)
        for name, text in texts.items():
            write_text(place / Path(name).name, text)
        files: list[str] = []
        if code["sum"] is not None:
            stored = find_code(host.root, code["sum"])
            shutil.copytree(stored, at, symlinks=True, copy_function=link_or_copy, dirs_exist_ok=True)
            files = [os.fsdecode(entry.name) for entry in list_files(stored).entries]
        within.mkdir(parents=True, exist_ok=True)
        record = {"at": code["at"], "files": files, "git": code["git"], "import_paths": code["import_paths"]}
        write_json(place / RECORD, record)
        keep_package(host.package)
    return place, within


def _below(text: str) -> Path:
    path = Path(text)
    if path.is_absolute() or ".." in path.parts:
        raise ClusterddpError(f"not below a tree: {text!r}")
    return path


def _spell(word: str | dict[str, str], place: Path | None) -> str:
    return word if isinstance(word, str) else f"{place}/{word['file']}"


def _listen(child: subprocess.Popen[bytes]) -> None:
    """Pass on Ctrl-C; end the command some time after the connection."""
    for _ in sys.stdin.buffer:
        _signal(child, signal.SIGINT)
    time.sleep(_GRACE_S)
    _signal(child, signal.SIGTERM)


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    """Signal the command and its children, as a terminal would."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(f"clusterddp-agent {json.dumps(answer)}\n")
    sys.stdout.flush()
