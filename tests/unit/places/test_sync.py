"""Runs whose files lie here: synchronising them asks no host, and loads nothing that only hosts need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from clusterddp.places.ssh.sync import NO_HOSTS, Synchroniser
from tests.support.handmade_runs import make_run


def test_a_run_of_this_machine_has_no_hosts_to_ask(tmp_path: Path) -> None:
    run = make_run(tmp_path, "local-1")
    with Synchroniser([run], {}) as sync:
        sync.update()
        sync.update_logs()
        assert (sync.download(), sync.ask_hosts(run, "beat", {})) == (True, {})


def test_without_runs_everything_is_downloaded() -> None:
    assert NO_HOSTS.download()


def test_a_run_of_this_machine_loads_no_ssh(tmp_path: Path) -> None:
    make_run(tmp_path, "local-1")
    code = (
        "import sys; from pathlib import Path; from clusterddp.places.ssh.sync import Synchroniser\n"
        "from clusterddp.run.directory import RunDir\n"
        f"Synchroniser([RunDir(Path({str(tmp_path / 'local-1')!r}))], {{}}).update()\n"
        "print({'paramiko', 'pydantic', 'yaml', 'clusterddp.places.ssh.session'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"
