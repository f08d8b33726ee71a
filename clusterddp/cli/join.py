"""The command join, which a user starts on each machine of a run."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from clusterddp.cli.arguments import StartOptions, collected, command, output_option, runs_option, spec_arguments
from clusterddp.cli.login import profile_option
from clusterddp.cli.terminal import Terminal, say, say_note
from clusterddp.cli.watch import stay_with
from clusterddp.look.printable import printable

if TYPE_CHECKING:
    from clusterddp.submission.join.updates import Joined


@command("join")
@spec_arguments
@click.option(
    "--node-rank", type=click.IntRange(min=0), metavar="N", help="The place of this machine in ssh.hosts, from 0."
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1),
    metavar="S",
    help="How many seconds to wait for the other machines; default: network.start_timeout, else 300.",
)
@click.option(
    "--resume", metavar="RUN", help="Go on with an earlier run of these machines, from its newest checkpoint."
)
@click.option("--cpu", is_flag=True, help="Run the ranks on the CPU, with gloo; on all machines or none.")
@click.option("-f", "--follow", is_flag=True, help="Show what rank 0 prints; on node 0.")
@output_option
@profile_option
@runs_option
@collected("options", StartOptions)
@click.pass_obj
def join(
    terminal: Terminal,
    *,
    spec: Path | str,
    overrides: tuple[str, ...],
    node_rank: int | None,
    timeout_s: float | None,
    resume: str | None,
    cpu: bool,
    options: StartOptions,
    profile: str | None,
) -> int:
    """Take part in the run of a spec; start this on each of its machines. No SSH, no scheduler.

    The machines are those of ssh.hosts, in that order: each finds itself by its own addresses and names. They connect
    to the first one, compare spec and versions, and start together. The run ends with this command, on any of them.

    \b
    clusterddp join job.yaml                  on every machine, in the directory of the code
    clusterddp join job.yaml --follow         on the first one, to see what rank 0 writes
    clusterddp join job.yaml --resume RUN     on every machine, to continue a run that has ended too early
    CLUSTERDDP_JOIN_KEY=... clusterddp join job.yaml     only machines with this key take part
    """
    from clusterddp.spec.load import load_spec
    from clusterddp.submission.join.join import join as join_run
    from clusterddp.submission.join.join import start_timeout_s

    flags = {"launcher": "ssh"} | ({"device": "cpu"} if cpu else {})
    resolved = load_spec(spec, overrides, profile=profile, environ=terminal.environ, flags=flags)
    joined = join_run(
        resolved,
        runs_dir=options.runs_dir,
        working_dir=Path.cwd(),
        environ=terminal.environ,
        node_rank=node_rank,
        timeout_s=timeout_s or start_timeout_s(resolved.job),
        resume=resume,
        report=lambda words: say(printable(words)),
    )
    return _stay_with(joined, terminal, options)


COMMANDS = {"join": join}


def _stay_with(joined: Joined, terminal: Terminal, options: StartOptions) -> int:
    """Show how the run goes on until it has ended; its notes and logs on node 0 only."""
    from clusterddp.run.record import read_run
    from clusterddp.submission.submit import Submitted
    from clusterddp.system.files import read_json

    signal.signal(signal.SIGTERM, _interrupt)  # as Ctrl-C: the run is cancelled, not lost
    run = joined.run
    if joined.node_rank == 0:
        for note in (read_json(run.plan) or {}).get("notes", ()):
            say_note(note)
    else:
        options = dataclasses.replace(options, follow=False)
    submitted = Submitted(
        run=run.name, launcher="join", job_id=read_run(run).job_id, run_dir=run.path, connections=joined
    )
    return stay_with(submitted, terminal, options, verb="joined")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
