"""The command help, which prints pages of docs/reference; they ship with the package."""

from __future__ import annotations

import re
from pathlib import Path

import click

import clusterddp
from clusterddp.cli.arguments import command
from clusterddp.cli.terminal import put
from clusterddp.errors import ClusterddpError, UsageError

TOPICS = {
    "launchers": "which launcher starts the ranks, and what to type",
    "spec": "every key of a spec",
    "commands": "every command and its options",
    "errors": "exit codes and errors",
    "environment": "variables that clusterddp reads, and those that a rank gets",
    "files": "the files of a run",
    "json": "the fields of -o json",
}
"""Page of docs/reference -> its content."""
_MORE = "clusterddp help COMMAND shows a command's options, help KEY or SECTION what it means in a spec."


@command("help")
@click.argument("topic", metavar="[TOPIC|COMMAND|KEY]", required=False)
@click.pass_context
def help_(ctx: click.Context, *, topic: str | None) -> None:
    """Print a page of the reference, the options of a command, or what a key or section of a spec means.

    Without TOPIC, the list of topics.
    """
    index = ctx.find_root().command
    assert isinstance(index, click.Group)
    if topic is None:
        lines = [f"  {name:<13}{summary}" for name, summary in TOPICS.items()]
        put("\n".join(["Topics of clusterddp help:", *lines, "", _MORE]))
    elif topic in TOPICS:
        put(_page(topic).rstrip("\n"))
    elif (asked := index.get_command(ctx, topic)) is not None:
        assert ctx.parent is not None
        put(asked.get_help(click.Context(asked, info_name=topic, parent=ctx.parent)))
    elif (section := _section_of_spec(topic)) is not None:
        put(section)
    else:
        hint = f"one of {', '.join(TOPICS)}, a command, or a key of a spec"
        raise UsageError(f"{topic}: no such topic, command or key", hint=hint)


COMMANDS = {"help": help_}


def _section_of_spec(key: str) -> str | None:
    """Return what the reference says of a key or a section, with the keys in it; None: there is none of this name."""
    found = re.search(rf"^(###?) {re.escape(key)}$.*?(?=^##? |^\1 |\Z)", _page("spec"), re.MULTILINE | re.DOTALL)
    return found[0].rstrip() if found else None


def _page(topic: str) -> str:
    package = Path(clusterddp.__file__).parent
    for folder in (package / "reference", package.parent / "docs" / "reference"):
        path = folder / f"{topic}.md"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise ClusterddpError(f"reference/{topic}.md: not in this installation of clusterddp", hint="install it again")
