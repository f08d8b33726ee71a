"""Commands that prepare: init, schema, completion."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from clusterddp.cli.arguments import command
from clusterddp.cli.login import ask_login, find_node, profile_option
from clusterddp.cli.terminal import Terminal, put, put_json, say
from clusterddp.errors import UsageError
from clusterddp.look.printable import printable
from clusterddp.system.templates import read_template

_ACTIVATION = {
    "bash": 'add to ~/.bashrc:  eval "$(clusterddp completion bash)"',
    "zsh": 'add to ~/.zshrc, after compinit:  eval "$(clusterddp completion zsh)"',
    "fish": "clusterddp completion fish > ~/.config/fish/completions/clusterddp.fish",
}


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
    cluster's: partition, GPUs, cores, memory, time limit, account; and what follows from how the cluster is set up is
    said. A PATH of - is standard output.
    """
    from clusterddp.cli.starter_spec import slurm_spec
    from clusterddp.system.files import write_text

    if partition is not None and launcher != "slurm":
        raise UsageError("--partition is for --launcher slurm")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no directory {path.parent}")
    text, notes = read_template(f"init_{launcher}.yaml"), list[str]()
    if launcher == "slurm" and (node := find_node(profile, terminal)):
        more = ["--partition", partition] if partition else []
        text = ask_login(node, ["init", "--launcher", "slurm", *more, "-"]).decode()
    elif launcher == "slurm":
        text, notes = slurm_spec(text, terminal.environ, partition)
    if str(path) == "-":
        put(text.rstrip("\n"))
        for note in notes:
            say(f"note: {printable(note)}")
        return
    if force:
        write_text(path, text)
    elif not write_text(path, text, exclusive=True):
        raise UsageError(f"{path}: exists, and is left as it is", hint="give another path, or --force")
    name = shlex.quote(str(path))
    say(f"wrote {path}")
    for note in notes:
        say(f"note: {printable(note)}")
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
    if sys.stdout.isatty():  # in a start-up file of a shell nobody wants to read this every time
        say(f"# {_ACTIVATION[shell]}")


COMMANDS = {"init": init, "schema": schema, "completion": completion}
