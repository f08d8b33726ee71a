"""Commands to begin with: demo, init, schema, completion."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clusterddp.cli.arguments import address, command, runs_option
from clusterddp.cli.login import ask_login, profile_option
from clusterddp.cli.terminal import Terminal, duration, put, put_json, say
from clusterddp.cli.watch import say_ending, say_note, watch_until_ended
from clusterddp.errors import RunFailedError, SlurmError, UsageError
from clusterddp.login.node import find_node
from clusterddp.run.directory import RunDir, read_json, write_text
from clusterddp.system.templates import read_template

if TYPE_CHECKING:
    from clusterddp.slurm.starter import Filled

_ACCURACY = 0.95
"""What the demo always reaches."""
_COMMENT_COLUMN = 30
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_NO_TEXT = {"true", "false", "yes", "no", "on", "off", "null", "y", "n", "auto"}
_ACTIVATION = {
    "bash": 'add to ~/.bashrc:  eval "$(clusterddp completion bash)"',
    "zsh": 'add to ~/.zshrc, after compinit:  eval "$(clusterddp completion zsh)"',
    "fish": "clusterddp completion fish > ~/.config/fish/completions/clusterddp.fish",
}


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
    cluster's: partition, GPUs, cores, memory, time limit, account; and notes say what follows from how the cluster is
    set up. A PATH of - is standard output.
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
    from clusterddp.spec.schema import json_schema

    put_json(json_schema(), indent=2)


@command("completion")
@click.argument("shell", type=click.Choice(sorted(_ACTIVATION)))
@click.pass_context
def completion(ctx: click.Context, *, shell: str) -> None:
    """Print the completion script of a shell: commands, options, runs and files.

    \b
    bash  in ~/.bashrc: eval "$(clusterddp completion bash)"
    zsh   in ~/.zshrc, after compinit: eval "$(clusterddp completion zsh)"
    fish  clusterddp completion fish > ~/.config/fish/completions/clusterddp.fish
    """
    from click.shell_completion import get_completion_class

    script_class = get_completion_class(shell)
    if script_class is None:  # click of another kind than the ones tested
        raise UsageError(f"{shell}: click has no completion for it")
    root = ctx.find_root().command
    put(script_class(root, {}, "clusterddp", "_CLUSTERDDP_COMPLETE").source())
    if sys.stdout.isatty():  # not where a start-up file of a shell evaluates this
        say(f"# {_ACTIVATION[shell]}")


COMMANDS = {"demo": demo, "init": init, "schema": schema, "completion": completion}


def say_result(run: RunDir, terminal: Terminal) -> None:
    """Print what was learned, and what to try next.

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


def slurm_spec(template: str, environ: Mapping[str, str], partition_name: str | None) -> tuple[str, list[str]]:
    """Fill the template with the cluster's facts; return it with what people should know about it.

    Where Slurm cannot be asked, the template stays as it is, and why is among the notes.
    Raises: UsageError: the cluster has no partition of that name.
    """
    from clusterddp.slurm.cluster import read_cluster
    from clusterddp.slurm.starter import Filled, choose_partition, consequences, fill_in

    named = [Filled(key="partition", value=partition_name, why="as you named it")] if partition_name else []
    try:
        cluster = read_cluster(environ)
    except SlurmError as error:
        return fill_template(template, named), [f"{error.message}: the values in it are examples, check each of them"]
    partition = choose_partition(cluster, partition_name)
    restarts = Filled(key="restarts", value="1", why="after a failure, preemption or the time limit")
    notes = [f"from cluster {cluster.name or 'without a name'}, Slurm {cluster.version or 'of an unknown version'}"]
    if partition is None:
        notes.append("no partition of it takes jobs of yours now: the values in it are examples, check each of them")
    filled = [*(fill_in(cluster, partition) if partition else named), restarts]
    return fill_template(template, filled), [*notes, *consequences(cluster, partition)]


def fill_template(template: str, values: Sequence[Filled]) -> str:
    """Put each value into the line of its key, which may have been a comment before."""
    for value in values:
        line = re.compile(rf"^( *)(?:# )?{re.escape(value.instead_of or value.key)}:.*$", re.MULTILINE)
        assert line.search(template), value.key
        mark = "# " if value.is_suggestion else ""
        text = f"{mark}{value.key}: {_scalar(value.value)}"

        def written(match: re.Match[str], text: str = text, why: str = value.why) -> str:
            return f"{match[1] + text:<{_COMMENT_COLUMN}}# {why}" if why else match[1] + text

        template = line.sub(written, template, count=1)
    return template


def _scalar(text: str) -> str:
    """Write a value so that YAML reads it as the same text."""
    if text.isdecimal() or (_PLAIN.fullmatch(text) and text.lower() not in _NO_TEXT):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
