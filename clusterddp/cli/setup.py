"""Commands to begin with: demo, schema, completion."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import click

from clusterddp.cli.arguments import address, command, runs_option
from clusterddp.cli.terminal import Terminal, duration, put, put_plain_json, say
from clusterddp.cli.watch import say_ending, watch_until_ended
from clusterddp.errors import RunFailedError, UsageError
from clusterddp.run.directory import RunDir
from clusterddp.system.files import read_json
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

    resolved = load_spec(read_template("demo.yaml"), environ=terminal.environ, whole=True)
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


@command("schema")
@click.option("--shared", is_flag=True, help="That of the project file clusterddp.yaml, and of a site file.")
def schema(*, shared: bool) -> None:
    """Print the JSON Schema of a spec.

    Editors complete and check with it, if the first line of a spec names the file:

    \b
    clusterddp schema > clusterddp.schema.json
    # yaml-language-server: $schema=clusterddp.schema.json
    """
    from clusterddp.spec.model import json_schema

    put_plain_json(json_schema(shared=shared), indent=2)


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


COMMANDS = {"demo": demo, "schema": schema, "completion": completion}


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
        ("the same with four ranks", f"clusterddp submit {where} resources.procs_per_node=4 --wait"),
        ("a spec of your own", "clusterddp init"),
    ):
        say(f"  {what:<28} {text}")
