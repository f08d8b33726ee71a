"""The command relay: copies a run to an experiment tracker, from a machine that has a network."""

from __future__ import annotations

from pathlib import Path

import click

from clusterddp.cli.arguments import command, output_option, run_argument, runs_option
from clusterddp.cli.login import works_at_login
from clusterddp.cli.terminal import Terminal, put_json, say, say_note
from clusterddp.launchers.state import read_state
from clusterddp.look.printable import printable
from clusterddp.results.sync import Synchroniser
from clusterddp.run.find import find_run
from clusterddp.run.sweep import find_sweep

_TRACKERS = ("wandb", "trackio", "mlflow", "tensorboard")


@command("relay")
@works_at_login
@run_argument()
@click.option("--to", "tracker", type=click.Choice(_TRACKERS), required=True, help="The experiment tracker.")
@click.option("--project", metavar="P", help="Its project or experiment; otherwise the name of the spec.")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run, or the sweep, has ended.")
@output_option
@runs_option
@click.pass_obj
def relay(
    terminal: Terminal, *, name: str, tracker: str, project: str | None, follow: bool, output: str, runs_dir: Path
) -> None:
    """Copy a run's metrics, configuration and end to an experiment tracker.

    A later call, also after a crash, sends only what the tracker does not have. All attempts are one run of the
    tracker; a sweep is a group of runs. It needs the tracker's library and its settings on the machine where it runs.
    """
    from clusterddp.relay.relay import open_relay, relay_once, relay_until_ended

    sweep = find_sweep(runs_dir, name)
    runs = sweep.runs() if sweep else [find_run(runs_dir, name)]
    with (
        Synchroniser(runs, terminal.environ, report=say_note) as sync,
        open_relay(runs, tracker, project=project, environ=terminal.environ) as copies,
    ):
        try:
            if follow:
                relay_until_ended(copies, sync, say_note)
            else:
                relay_once(copies, sync)
        except KeyboardInterrupt:
            say("\ndetached; the same command goes on where this one stopped")
            raise
        rows = [
            {
                "run": copy.run.name,
                "state": read_state(copy.run).state.value,
                "new_rows": copy.points,
                "where": copy.where,
            }
            for copy in copies
        ]
    if output == "json":
        put_json({"tracker": tracker, "runs": rows})
        return
    for row in rows:
        say(f"{row['run']} {row['state']}: {row['new_rows']:,} new rows  {printable(str(row['where']))}")


COMMANDS = {"relay": relay}
