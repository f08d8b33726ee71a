"""Commands to begin with: demo, init, schema, completion."""

from __future__ import annotations

import functools
import shlex
import sys
from pathlib import Path

import click

from clusterddp.cli.arguments import address, command, runs_option
from clusterddp.cli.login import ask_login, profile_option
from clusterddp.cli.terminal import Terminal, duration, put, put_json, say
from clusterddp.cli.watch import say_ending, say_note, watch_until_ended
from clusterddp.errors import RunFailedError, UsageError
from clusterddp.login.node import find_node
from clusterddp.run.directory import RunDir
from clusterddp.system.files import read_json, write_text
from clusterddp.system.templates import read_template

_ACCURACY = 0.95
"""The demo always reaches this."""
_ACTIVATION = {
    "bash": 'add to ~/.bashrc:  eval "$(clusterddp completion bash)"',
    "zsh": 'add to ~/.zshrc, after compinit:  eval "$(clusterddp completion zsh)"',
    "fish": "clusterddp completion fish > ~/.config/fish/completions/clusterddp.fish",
}

_NO_SPACE = (
    (
        "    done\n\n    return 0\n",
        "    done\n    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace\n\n    return 0\n",
    ),
    (
        "        _describe -V unsorted completions_with_descriptions -U\n",
        "        if [[ ${completions_with_descriptions[1]%%:*} == *[=.] ]]; then\n"
        "            _describe -V unsorted completions_with_descriptions -U -S ''\n"
        "        else\n"
        "            _describe -V unsorted completions_with_descriptions -U\n"
        "        fi\n",
    ),
)
"""What click's scripts for bash and zsh lack: no space after `train.lr=` and `train.`."""


@command("demo")
@runs_option
@click.pass_obj
def demo(terminal: Terminal, *, runs_dir: Path) -> int:
    """Let two ranks on this machine learn to tell shapes apart: no spec, no network, no GPU, under a minute.

    Ctrl-C ends the run.
    """
    from clusterddp.planning.placement import Request
    from clusterddp.planning.plan import plan_run
    from clusterddp.spec.load import load_spec
    from clusterddp.submission.cancel import cancel
    from clusterddp.submission.submit import submit

    resolved = load_spec(read_template("demo.yaml"), environ=terminal.environ)
    plan = plan_run(resolved, Request(runs_dir=runs_dir, working_dir=Path.cwd(), environ=terminal.environ))
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


@command("init")
@click.argument("path", default="job.yaml", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--launcher",
    type=click.Choice(["local", "ssh", "slurm"]),
    default="local",
    show_default=True,
    help="What starts the ranks.",
)
@click.option("--partition", metavar="NAME", help="With launcher slurm: for this partition, not the usual one.")
@profile_option
@click.option("--force", is_flag=True, help="Overwrite PATH when it exists.")
@click.pass_obj
def init(
    terminal: Terminal, *, path: Path, launcher: str, partition: str | None, profile: str | None, force: bool
) -> None:
    """Write a commented spec to PATH (job.yaml) to start from.

    With --launcher slurm, on a machine of the cluster or with a profile that has a login node, its values are the
    cluster's: partition, GPUs, cores, memory, time limit, account; notes explain what the cluster's settings mean for
    runs. A PATH of - is standard output.
    """
    if partition is not None and launcher != "slurm":
        raise UsageError("--partition is for --launcher slurm")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no directory {path.parent}")
    text, notes = read_template(f"init_{launcher}.yaml"), list[str]()
    if launcher == "slurm" and (node := find_node(profile, terminal.environ)):
        more = ["--partition", partition] if partition else []
        text = ask_login(node, ["init", "--launcher", "slurm", *more, "-"]).decode()
    elif launcher == "slurm":
        from clusterddp.slurm.first_spec import slurm_spec

        text, notes = slurm_spec(text, terminal.environ, partition)
    if str(path) == "-":
        put(text.rstrip("\n"))
        for note in notes:
            say_note(note)
        return
    if force:
        write_text(path, text)
    elif not write_text(path, text, exclusive=True):
        raise UsageError(f"{path}: exists, and is left as it is", hint="give another path, or --force")
    name = shlex.quote(str(path))
    say(f"wrote {path}")
    for note in notes:
        say_note(note)
    say(f"  check it  clusterddp submit {name} --dry-run")
    say(f"  run it    clusterddp submit {name} --follow")


@command("schema")
def schema() -> None:
    """Print the JSON Schema of a spec.

    Editors complete and check with it:

    \b
    clusterddp schema > clusterddp.schema.json
    and as the first line of the spec:  # yaml-language-server: $schema=clusterddp.schema.json
    """
    from clusterddp.spec.model import json_schema

    put_json(json_schema(), indent=2)


@command("completion")
@click.argument("shell", type=click.Choice(sorted(_ACTIVATION)))
@click.pass_context
def completion(ctx: click.Context, *, shell: str) -> None:
    """Print the completion script of a shell: commands, options, runs, files, and keys of a spec with their values.

    \b
    bash  in ~/.bashrc: eval "$(clusterddp completion bash)"
    zsh   in ~/.zshrc, after compinit: eval "$(clusterddp completion zsh)"
    fish  clusterddp completion fish > ~/.config/fish/completions/clusterddp.fish
    """
    from click.shell_completion import get_completion_class

    script_class = get_completion_class(shell)
    if script_class is None:  # another version of click
        raise UsageError(f"{shell}: click has no completion for it")
    root = ctx.find_root().command
    script = script_class(root, {}, "clusterddp", "_CLUSTERDDP_COMPLETE").source()
    put(functools.reduce(lambda text, change: text.replace(*change), _NO_SPACE, script))
    if sys.stdout.isatty():  # not where a start-up file of a shell evaluates this
        say(f"# {_ACTIVATION[shell]}")


COMMANDS = {"demo": demo, "init": init, "schema": schema, "completion": completion}


def say_result(run: RunDir, terminal: Terminal) -> None:
    """Print the accuracy, and what to try next.

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
