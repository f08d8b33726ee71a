"""Which nodes a job may get: those that earlier runs have marked are left out; what is down, and what will be."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator, Mapping

from clusterddp.errors import ClusterddpError
from clusterddp.network.hostlist import expand
from clusterddp.places.slurm.cluster import SEPARATOR, is_usable
from clusterddp.places.slurm.commands import run_slurm
from clusterddp.places.slurm.queue import read_time
from clusterddp.planning.slurm import SlurmPlan
from clusterddp.run.node_marks import read_marks
from clusterddp.spec.fields import read_duration

_TIMEOUT_S = 5.0
"""How long Slurm may take: a plan can do without the answer."""
_SOON_S = 7 * 24 * 3600.0
"""A maintenance is said to a job without a time limit, if it begins by then."""


def read_nodes(plan: SlurmPlan, environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Read the nodes of the job's partitions, or of the default one: name -> sinfo's state, and why it is down.

    Raises: SlurmError: Slurm does not answer.
    """
    partition = plan.option("partition")
    argv = ["sinfo", "-h", "-N", "-o", SEPARATOR.join(("%N", "%t", "%E", "%P"))]
    argv += [f"--partition={partition}"] if partition else []
    rows = run_slurm(argv, environ=environ, timeout_s=_TIMEOUT_S).splitlines()
    cells = [row.split(SEPARATOR) for row in rows if row.count(SEPARATOR) == 3]
    return {
        name.strip(): (state.strip(), why.strip())
        for name, state, why, of_it in cells
        if partition or of_it.strip().endswith("*")
    }


def leave_out(plan: SlurmPlan, environ: Mapping[str, str], *, least: int | None = None) -> SlurmPlan:
    """Return the job without the nodes that are marked, as far as its partition has enough others.

    `least`: how many are enough, if not as many as the job asks for. A failed node goes before a slow one. Where Slurm
    does not answer, none is left out.
    """
    left_out: dict[str, str] = {}
    marks = read_marks("slurm", plan.option("clusters"))
    try:
        nodes = read_nodes(plan, environ) if marks else {}
        wanted, own = set(_expand(plan.option("nodelist"))), set(_expand(plan.option("exclude")))
    except ClusterddpError:
        return dataclasses.replace(plan, left_out={})
    usable = {name for name, (state, _) in nodes.items() if is_usable(state)} - own
    asked = re.findall(r"\d+", plan.option("nodes"))
    spare = len(usable) - (least or (int(asked[-1]) if asked else 1))
    for mark in sorted(marks, key=lambda mark: mark.since - mark.until):
        if mark.node in nodes and mark.node not in wanted | own:
            spare -= mark.node in usable
            if spare < 0:
                break
            left_out[mark.node] = mark.spell()
    return dataclasses.replace(plan, left_out=left_out)


def count_usable(plan: SlurmPlan, environ: Mapping[str, str]) -> int:
    """Count the nodes that a job may get, now or later. Raises: SlurmError: Slurm does not answer."""
    out = {*_expand(plan.option("exclude")), *plan.left_out}
    return sum(is_usable(state) and name not in out for name, (state, _) in read_nodes(plan, environ).items())


def notes_on_nodes(plan: SlurmPlan, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Say which nodes of `nodelist` cannot start a job now, and which maintenance begins before the job's end."""
    try:
        return (*_notes_on_nodelist(plan, environ), *_notes_on_maintenance(plan, environ))
    except ClusterddpError:  # sbatch says what is wrong
        return ()


def _notes_on_nodelist(plan: SlurmPlan, environ: Mapping[str, str]) -> Iterator[str]:
    wanted = _expand(plan.option("nodelist"))
    nodes = read_nodes(plan, environ) if wanted else {}
    for name in wanted:
        state, why = nodes.get(name, ("", ""))
        if not is_usable(state):
            yield f"slurm.nodelist: {name} is {state} ({why}): the job waits for it"


def _notes_on_maintenance(plan: SlurmPlan, environ: Mapping[str, str]) -> Iterator[str]:
    text, now = plan.option("time"), time.time()
    limit_s = _read_limit_s(text)
    argv = ["scontrol", "show", "reservation", "-o"]
    for line in run_slurm(argv, environ=environ, timeout_s=_TIMEOUT_S).splitlines():
        values = dict(word.split("=", 1) for word in line.split() if "=" in word)
        begin = read_time(values.get("StartTime", ""))
        if begin is None or "MAINT" not in values.get("Flags", "") or not now < begin < now + limit_s:
            continue
        when, nodes = time.strftime("%Y-%m-%d %H:%M", time.localtime(begin)), values.get("Nodes", "")
        cause = f"its time limit is {text}" if text else "it has no time limit"
        hint = f"a shorter resources.time than {(begin - now) / 3600:.1f} h lets it start before"
        yield f"maintenance of {nodes} begins {when}, and {cause}: Slurm gives it none of these nodes; {hint}"


def _read_limit_s(text: str) -> float:
    """Read the time limit of a spec, or of a user's script, where a large number of minutes is fine, too."""
    if text.isdecimal():
        return 60.0 * int(text)
    try:
        return float(read_duration(text).seconds)
    except ValueError:  # none, UNLIMITED, or what sbatch refuses
        return _SOON_S


def _expand(hosts: str) -> tuple[str, ...]:
    """Return the names of a host list; none of a file of them. Raises: ClusterddpError."""
    return expand(hosts) if hosts and "/" not in hosts else ()
