"""How a process that runs Python is started: it imports no module from the directory that it starts in.

Python looks there first for `-m` and `-c`, and another user, or the author of a repository, may have left a json.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import clusterddp

OLDEST_PYTHON = (3, 10)
"""The oldest release that runs ranks."""
_FLAG = ("-P",) if sys.version_info >= (3, 11) else ()
_SHORTEN = "import sys; sys.path[:] = filter(None, sys.path); "
"""What -P does, on any Python: with `-c` the directory is the empty text."""
_RUN_MODULE = f"{_SHORTEN}from runpy import run_module; run_module(sys.argv.pop(1), None, '__main__', True)"

_OLD = "'it is Python %d.%d, expected {}.{} or newer' % sys.version_info[:2]"
_RUN_ISOLATED = (
    "import os, sys; sys.path.append(sys.argv.pop(1)); "
    "given = open('/proc/self/environ', 'rb').read().split(b'\\0'); "
    "any(pair.startswith(b'LC_CTYPE=') for pair in given) or os.environ.pop('LC_CTYPE', None); "
    f"{_RUN_MODULE.removeprefix(_SHORTEN)}"
)
"""Python sets LC_CTYPE where the locale is C; what such a process starts must not get it."""


def module_command(
    module: str, *arguments: str, python: str | None = None, oldest: tuple[int, int] | None = None
) -> tuple[str, ...]:
    """Return the command that runs a module; `python`: another Python than this one, of any release.

    `oldest`: an older release ends with a sentence about it on its standard error.
    """
    if python is None and _FLAG:
        return (sys.executable, *_FLAG, "-m", module, *arguments)
    check = f"import sys; sys.version_info >= {oldest} or sys.exit({_OLD.format(*oldest)}); " if oldest else ""
    return (python or sys.executable, "-c", check + _RUN_MODULE, module, *arguments)


def isolated_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module in an environment of the user's, whose PYTHON... variables do not count."""
    parent = str(Path(clusterddp.__file__).parents[1])
    return (sys.executable, "-I", "-c", _RUN_ISOLATED, parent, module, *arguments)


def code_command(code: str, *arguments: str, python: str | None = None) -> tuple[str, ...]:
    """Return the command that runs a text of Python; `python`: another one than this one, of any release."""
    flags = _FLAG if python is None else ()
    return (python or sys.executable, *flags, "-c", code if flags else f"{_SHORTEN}\n{code}", *arguments)
