"""Which nodes of its job an attempt gets, where the job has spares or the run may go on with fewer (`elastic`).

An attempt is a step of the job. Slurm would end the whole job with a node that it finds lost, so a node that an attempt
has lost is given back to Slurm at once. The batch host is never given back: with its loss Slurm requeues the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.places.slurm.commands import run_slurm
from clusterddp.run.node_marks import read_marks


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNodes:
    """The nodes of a job, and how many of them an attempt takes."""

    hosts: tuple[str, ...]
    """Of the job: the batch host, then those that are to be taken first."""
    num_nodes: int
    """How many an attempt takes where there are so many; the others are spares."""
    min_nodes: int
    """How many it needs."""
    max_nodes: int
    """How many a job of the run asks for."""
    ranks_per_node: int
    overlaps: bool = False
    """True: Slurm still counts the step of the attempt before, which waits for its lost node."""

    @classmethod
    def of_gang(cls, gang: Mapping[str, Any], hosts: Sequence[str], cluster: str) -> StepNodes:
        """Return those of an elastic run, whose gang is that of plan.json, in a job that has these hosts."""
        sizes = [len(node["ranks"]) for node in gang["nodes"] if node["ranks"]]
        nodes = cls(
            hosts=tuple(hosts),
            num_nodes=len(sizes),
            min_nodes=int(gang["min_nodes"]),
            max_nodes=len(gang["nodes"]),
            ranks_per_node=sizes[0],
        )
        return nodes.without((), cluster)

    @property
    def taken(self) -> tuple[str, ...]:
        """The nodes of the next attempt."""
        return self.hosts[: self.num_nodes]

    def without(self, lost: Collection[str], cluster: str) -> StepNodes:
        """Return what is left; nodes that runs have marked are taken last."""
        marked = {mark.node for mark in read_marks("slurm", cluster)}
        batch_host, *others = self.hosts
        left = [batch_host, *sorted(others, key=lambda host: host in marked)]
        hosts = tuple(host for host in left if host not in lost)
        return dataclasses.replace(self, hosts=hosts, overlaps=self.overlaps or bool(lost))

    def step(self, srun: Sequence[str]) -> tuple[str, ...]:
        """Return srun's argv for a step on the nodes of the next attempt."""
        number = len(self.taken)
        sizes = {"--nodes=": number, "--ntasks=": number * self.ranks_per_node}
        words = [next((f"{name}{sizes[name]}" for name in sizes if word.startswith(name)), word) for word in srun]
        at = words.index("srun") + 1
        shared = ("--overlap", "--mem=0") if self.overlaps else ()  # a step has all memory of the job, too
        return (*words[:at], f"--nodelist={','.join(self.taken)}", *shared, *words[at:])

    def request(self, usable: int, cpus_per_task: int) -> dict[str, str]:
        """Return what a job that is queued again is to ask for, where so many nodes are usable, as scontrol has it.

        Of a range of nodes Slurm (22.05) would always give the fewest.
        """
        number = max(self.min_nodes, min(self.max_nodes, usable))
        tasks = number * self.ranks_per_node
        return {"NumNodes": str(number), "NumTasks": str(tasks), "NumCPUs": str(tasks * cpus_per_task)}

    def explain(self, before: Sequence[str], why: Mapping[str, str]) -> str:
        """Say why the next attempt has other nodes than the one before had; empty: it has the same.

        `before`: empty for the first one in the job. `why`: what is known of lost nodes, by their names.
        """
        came = [host for host in self.taken if host not in before]
        facts = []
        for node_rank, host in enumerate(before):
            if host not in self.taken:
                what = f"was lost ({why[host]})" if host in why else "is left out"
                fact = f"node {node_rank} on {host} {what}"
                facts.append(f"{fact}; {came.pop(0)}, a spare, took its place" if came else fact)
        if len(self.taken) != (len(before) or self.num_nodes):
            facts.append(f"the run goes on with {len(self.taken)} of {self.num_nodes} nodes")
        return "; ".join(facts)


def give_back(job_id: str, kept: Sequence[str], environ: Mapping[str, str]) -> None:
    """Let a running job keep only these of its nodes. Raises: SlurmError."""
    run_slurm(["scontrol", "update", f"JobId={job_id}", f"NodeList={','.join(kept)}"], environ=environ)
    for path in Path().glob(f"slurm_job_{job_id}_resize.*"):  # scontrol's, to change the variables of a shell
        with contextlib.suppress(OSError):
            path.unlink()
