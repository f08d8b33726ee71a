"""The command that is typed on each machine of a run: join."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

import click

from clusterddp.cli.arguments import StartOptions, command, output_option, runs_option
from clusterddp.cli.login import profile_option
from clusterddp.cli.terminal import Terminal, say
from clusterddp.cli.watch import say_note, stay_with
from clusterddp.look.printable import printable


@command("join")
@click.argument("spec", type=click.Path(allow_dash=True, dir_okay=False))
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
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
@click.pass_obj
def join(
    terminal: Terminal,
    *,
    spec: str,
    overrides: tuple[str, ...],
    node_rank: int | None,
    timeout_s: float | None,
    resume: str | None,
    cpu: bool,
    follow: bool,
    output: str,
    profile: str | None,
    runs_dir: Path,
) -> int:
    """Take part in the run of a spec, typed on each of its machines; no SSH, no scheduler.

    The machines are those of ssh.hosts, in that order: each finds itself by its own addresses and names. They meet at
    the first one, compare spec and versions, and start together. The run ends with this command, on any of them.

    \b
    clusterddp join job.yaml                  on every machine, where the code lies
    clusterddp join job.yaml --follow         on the first one, to see what rank 0 writes
    clusterddp join job.yaml --resume RUN     on every machine, when it has ended before it was done
    CLUSTERDDP_JOIN_KEY=... clusterddp join job.yaml     only machines with this key take part
    """
    from clusterddp.run.record import read_run
    from clusterddp.spec.load import load_spec
    from clusterddp.submission.join.join import join as join_run
    from clusterddp.submission.join.join import start_timeout_s
    from clusterddp.submission.submit import Submitted
    from clusterddp.system.files import read_json

    flags = {"launcher": "ssh"} | ({"device": "cpu"} if cpu else {})
    resolved = load_spec(
        "-" if spec == "-" else Path(spec), overrides, profile=profile, environ=terminal.environ, flags=flags
    )
    joined = join_run(
        resolved,
        runs_dir=runs_dir,
        working_dir=Path.cwd(),
        environ=terminal.environ,
        node_rank=node_rank,
        timeout_s=timeout_s or start_timeout_s(resolved.job),
        resume=resume,
        report=lambda words: say(printable(words)),
    )
    signal.signal(signal.SIGTERM, _interrupt)  # as Ctrl-C: the run is cancelled, not lost
    for note in (read_json(joined.run.plan) or {}).get("notes", ()) if joined.node_rank == 0 else ():
        say_note(note)
    job_id = read_run(joined.run).job_id
    submitted = Submitted(
        run=joined.run.name, launcher="join", job_id=job_id, run_dir=joined.run.path, connections=joined
    )
    options = StartOptions(runs_dir=runs_dir, output=output, follow=follow and joined.node_rank == 0, wait=True)
    return stay_with(submitted, terminal, options, verb="joined")


COMMANDS = {"join": join}


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
