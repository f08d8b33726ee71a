"""Specs and plans for tests of the launcher: small scripts as entries, no torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterddp.planning.placement import Request
from clusterddp.planning.plan import Plan, plan_run
from clusterddp.run.cleanup import find_processes, read_cookie
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_run
from clusterddp.spec.load import load_spec
from clusterddp.system.files import read_json
from clusterddp.system.processes import Process
from tests.support.waiting import wait_until

HELLO = "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\n"
IMPATIENT = 'network: {host_silence: "0:08", heartbeat_timeout: "0:10"}\n'
"""For tests in which a host is lost; the defaults, 30 s and 60 s, are those of test_slurm_show.py and ssh_kills.py."""
SLEEP = HELLO + "import time\ntime.sleep(120)\n"
STOPPABLE = (
    HELLO + "import time, clusterddp\nwhile not clusterddp.should_stop():\n    time.sleep(0.02)\nprint('stopped')\n"
)


def plan_script(
    directory: Path,
    code: str = HELLO,
    *,
    more: str = "",
    resources: str = "{nodes: 2, procs_per_node: 2}",
    environ: Mapping[str, str] | None = None,
) -> Plan:
    """Plan a run of a script with this code; `more` are further lines of the spec."""
    (directory / "entry.py").write_text(code)
    text = f"name: job\nresources: {resources}\nentry: {{script: entry.py}}\n{more}\n"
    return plan_text(text, directory, environ=environ)


def plan_text(text: str, directory: Path, *, environ: Mapping[str, str] | None = None, **changes: Any) -> Plan:
    """Plan a spec that is given as text, submitted from `directory`."""
    environ = {"PATH": os.environ["PATH"]} if environ is None else environ
    resolved = load_spec(text, environ={})
    request = {"runs_dir": directory / "runs", "working_dir": directory, "environ": environ}
    return plan_run(resolved, Request(**request | changes))


def wait_for_ranks(run: RunDir, num_ranks: int = 4) -> None:
    """Wait until all ranks of attempt 0 have printed something."""
    attempt = run.attempts()[-1]

    def all_speak() -> bool:
        logs = [attempt.stdout(rank) for rank in range(num_ranks)]
        return all(log.exists() and log.stat().st_size for log in logs) and attempt.start.exists()

    wait_until(all_speak)


def processes_of(run: RunDir) -> dict[str, list[Process]]:
    """Return the live processes of a run by role; of those with the role `task`, submitit's controller apart."""
    record = read_run(run)
    keeper = (record.keeper or {}).get("pid")
    roles: dict[str, list[Process]] = {}
    for process in find_processes(f"{record.token}."):
        role = read_cookie(process).rpartition(".")[2]
        roles.setdefault("controller" if process.pid == keeper else role, []).append(process)
    return roles


def git(directory: Path, *arguments: str) -> str:
    """Run git in a repository of a test, whatever the user's configuration says."""
    command = [
        "git",
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@example.org",
        "-c",
        "init.defaultBranch=main",
        *arguments,
    ]
    environment = {"PATH": os.environ["PATH"], "HOME": str(directory), "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(command, cwd=directory, env=environment, check=True, capture_output=True, text=True).stdout


def bare_repository(place: Path, command: str) -> None:
    """Plant a repository whose remote is a command, which git starts to fetch an object that is missing."""
    for folder in ("objects", "refs"):
        (place / folder).mkdir(parents=True)
    (place / "HEAD").write_text("ref: refs/heads/main\n")
    (place / "config").write_text(
        "[core]\n repositoryformatversion = 1\n bare = true\n[extensions]\n partialClone = origin\n"
        f'[remote "origin"]\n url = .\n promisor = true\n uploadpack = "{command}; false"\n'
    )


def read_plan(run: RunDir) -> dict[str, Any]:
    plan = read_json(run.plan)
    assert isinstance(plan, dict)
    return plan
