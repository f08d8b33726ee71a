"""The command `demo`: two ranks on this machine, through the very path that every run takes."""

from __future__ import annotations

from pathlib import Path

import click

from clusterddp.cli.arguments import address, command, runs_option
from clusterddp.cli.terminal import Terminal, duration, say
from clusterddp.cli.watch import say_ending, watch_until_ended
from clusterddp.errors import RunFailedError
from clusterddp.run.directory import RunDir
from clusterddp.system.files import read_json
from clusterddp.system.templates import read_template

_ACCURACY = 0.95


@command("demo")
@runs_option
@click.pass_obj
def demo(terminal: Terminal, *, runs_dir: Path) -> int:
    """Let two ranks on this machine learn to tell shapes apart: no spec, no network, no GPU, under a minute.

    Ctrl-C ends the run.
    """
    from clusterddp.planning.plan import plan_run
    from clusterddp.spec.load import load_spec
    from clusterddp.submission.submit import cancel, submit

    resolved = load_spec(read_template("demo.yaml"), environ=terminal.environ)
    plan = plan_run(resolved, runs_dir=runs_dir, working_dir=Path.cwd(), environ=terminal.environ)
    submitted = submit(plan)
    run = RunDir(Path(submitted.run_dir))
    try:
        say(f"{submitted.run}: {plan.gang.world_size} ranks on this machine learn to tell generated shapes apart")
        view = watch_until_ended(run, terminal)
    except KeyboardInterrupt:
        say(f"\n{submitted.run}: {cancel(run)}")
        raise
    if view.state.value != "COMPLETED":
        return say_ending(run, view, terminal)
    say_result(run, terminal)
    return 0


COMMANDS = {"demo": demo}


def say_result(run: RunDir, terminal: Terminal) -> None:
    """Tell what was learned, and what to try next.

    Raises: RunFailedError: the accuracy is below what the demo always reaches.
    """
    summary = read_json(run.summary) or {}
    accuracy = float(summary.get("accuracy") or 0.0)
    seconds = float(summary.get("train_seconds") or 0.0)
    say(
        f"{accuracy:.1%} of {summary.get('eval_samples')} unseen images classified correctly, "
        f"after {duration(seconds)} of training on {summary.get('world_size')} ranks"
    )
    where = address(run, terminal)
    if accuracy < _ACCURACY:
        raise RunFailedError(
            f"{run.name} completed, but {accuracy:.1%} is below the {_ACCURACY:.0%} that it should reach",
            hint=f"clusterddp logs {where} --rank all",
        )
    say("next:")
    for what, text in (
        ("what happened, rank by rank", f"clusterddp status {where}"),
        ("what rank 0 wrote", f"clusterddp logs {where}"),
        ("the same with four ranks", f"clusterddp rerun {where} resources.procs_per_node=4 --wait"),
        ("a spec of your own", "clusterddp init"),
    ):
        say(f"  {what:<28} {text}")
