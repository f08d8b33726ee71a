"""What goes to the hosts of a run before it starts: its code, once for each content and disk, and the data it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterddp.planning.ssh import directory_name
from clusterddp.remote.upload import SEND_TIMEOUT_S, Cargo, Groups, Watch, find_groups, results_of
from clusterddp.remote.upload_data import send_data
from clusterddp.ssh.session import Session, ask_all
from clusterddp.system.tree import list_tree
from clusterddp.system.tree_stream import Sending

if TYPE_CHECKING:
    from clusterddp.planning.plan import Plan
    from clusterddp.run.directory import RunDir


@dataclass(frozen=True, kw_only=True, slots=True)
class Shipped:
    """What is on the hosts now."""

    code_sum: str | None
    """None: the run has no snapshot of its code."""
    groups: Groups
    """Hosts that share the directory of what is ours."""
    sent_bytes: int
    notes: tuple[str, ...] = ()


def ship(plan: Plan, sessions: Mapping[str, Session], run: RunDir, *, watch: Watch | None = None) -> Shipped:
    """Have on every host what the run needs there; what is there already is not sent.

    The run's directory on the hosts then has its `code`. `watch` is called now and then, by any thread.
    Raises: ClusterddpError: something cannot be read here, or changes. SshError, PreflightError: hosts refuse it.
    """
    assert plan.ssh is not None
    cargo = Cargo(sessions=sessions, watch=watch)
    groups = find_groups(sessions)
    code_sum = read_code_sum(run)
    if code_sum is not None:
        _send_code(cargo, code_sum, run, [group[0] for group in groups], directory_name(plan.run, plan.token))
    notes = [note for send in plan.ssh.send for note in send_data(send.source, send.target, cargo)]
    return Shipped(code_sum=code_sum, groups=groups, sent_bytes=cargo.sent_bytes, notes=tuple(notes))


def read_code_sum(run: RunDir) -> str | None:
    """Read which snapshot a run has; None: it has none."""
    return run.code.resolve().name if run.code.is_symlink() else None


def _send_code(cargo: Cargo, code_sum: str, run: RunDir, hosts: list[str], run_name: str) -> None:
    """Have the snapshot in the stores of hosts, and a copy of it in the run's directory there."""
    asked = {host: cargo.sessions[host] for host in hosts}
    facts = {"kind": "code", "sums": [code_sum]}
    replies = results_of(ask_all(asked, "store.missing", facts, timeout_s=SEND_TIMEOUT_S))
    missing = [host for host, reply in replies.items() if reply.facts["missing"]]
    if missing:
        root = run.code.resolve()
        entries, _ = list_tree(root)
        sendings = {host: Sending(root=root, entries=entries) for host in missing}
        cargo.send(sendings, {"kind": "code", "sum": code_sum})
    facts = {"sum": code_sum, "name": run_name}
    results_of(ask_all(asked, "store.checkout", facts, timeout_s=SEND_TIMEOUT_S))
