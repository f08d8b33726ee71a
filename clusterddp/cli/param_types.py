"""The types of arguments and options: a run, a key and its value, a spec, a host, an age; how each is completed."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from clusterddp.errors import ClusterddpError
from clusterddp.run.sweep import SweepDir
from clusterddp.run.usage import parse_age


class RunName(click.types.StringParamType):
    """A run or a sweep: its name, the beginning of it, `@last`, or its directory."""

    name = "run"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from clusterddp.spec.layers import default_runs_dir

        try:
            runs_dir = ctx.params.get("runs_dir") or default_runs_dir(ctx.obj.environ if ctx.obj else {})
            names = sorted(entry.name for entry in os.scandir(runs_dir) if not entry.name.startswith("."))
        except (OSError, ClusterddpError):
            return []
        names += [path.stem for path in Path(runs_dir, ".login").glob("*.json")]  # those on clusters
        sweep = SweepDir(Path(runs_dir) / incomplete.rpartition(".")[0])
        names += sweep.run_names() if sweep.tasks.is_file() else []
        return [CompletionItem(name) for name in [*names, "@last"] if name.startswith(incomplete)]


class KeyValue(click.types.StringParamType):
    """`KEY=VALUE`: completed with the keys of a spec, then with the values of a key that has a fixed choice."""

    name = "key=value"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from clusterddp.spec.keys import complete_override

        # bash takes = for the end of a word: key, = and value come apart, click leaves out a = that is the last, and
        # bash replaces the value only.
        before: tuple[str, ...] = ctx.params.get(param.name or "") or ()
        words = [word for word in before[-2:] if word != "="]
        is_parted = bool(before) and (before[-1] == "=" or not ("=" in before[-1] or before[-1].startswith("~")))
        parted = f"{words[-1]}=" if is_parted and words else ""
        found = complete_override(parted + incomplete)
        return [CompletionItem(text.removeprefix(parted), help=help_text or None) for text, help_text in found]


class SpecPath(click.Path):
    """The path of a spec; `-` is standard input."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "-" else super().convert(value, param, ctx)


class SpecOrRun(SpecPath):
    """The path of a spec, or a run whose spec is meant."""

    def __init__(self) -> None:
        click.Path.__init__(self, path_type=Path)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete with files, and with runs where no file begins so."""
        is_file = not incomplete or any(Path().glob(f"{glob.escape(incomplete)}*"))
        runs = [] if is_file else RunName().shell_complete(ctx, param, incomplete)
        return runs or super().shell_complete(ctx, param, incomplete)


class HostName(click.types.StringParamType):
    """A host, or a host list; completed with the names of ~/.ssh/config."""

    name = "host"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from clusterddp.ssh.config import config_names, home

        names = config_names(home() / ".ssh" / "config")
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


class Age(click.types.StringParamType):
    """An age such as 12h, 30d or 4w, as seconds."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = value if isinstance(value, float) else parse_age(str(value))
        if seconds is None:
            self.fail(f'"{value}": expected an age of an hour or more, such as 12h, 30d or 4w', param, ctx)
        return seconds
