"""Finds the packages that may be imported before the entry runs, by reading its source.

A fork server imports them for all ranks of a node; a rank that starts by itself imports them first, because it does so
without garbage collection (rank.py). No code of the user is executed. Only packages of `PRELOADABLE` are returned,
which do not read a rank's variables when they are imported; Lightning and others read RANK.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from clusterddp.ranks.environment import PRELOAD
from clusterddp.run.gang import Entry

PRELOADABLE = frozenset({"clusterddp", "numpy", "torch", "torchvision"})
_NOT_PRELOADABLE = frozenset({"torch.utils.tensorboard"})
"""Imports packages that are not in PRELOADABLE."""
_MAX_FILES = 200
_MAX_FILE_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Preload:
    """The modules that may be imported before the entry runs, in order; none: `why_not` is the reason."""

    modules: tuple[str, ...] = ()
    why_not: str = ""

    def environment(self) -> dict[str, str]:
        """Return the variable that makes a rank that starts by itself import them."""
        return {PRELOAD: ",".join(self.modules)} if self.modules else {}


class _EnvironmentChangesError(Exception):
    """The entry changes the environment before an import that may read it; the message says where."""


@dataclass(slots=True)
class _Scan:
    search_dirs: tuple[Path, ...]
    """The directories of the entry's own modules; a package there shadows an installed one."""
    modules: dict[str, None] = field(default_factory=dict)
    seen: set[Path] = field(default_factory=set)
    may_train: bool = False
    """Whether the code names an optimizer or DistributedDataParallel, or imports packages that are not read."""


def find_preload(entry: Entry) -> Preload:
    """Return the modules of PRELOADABLE that the entry, and the modules beside it, import at their top level."""
    if not entry.fork:
        return Preload(why_not="entry.fork is false")
    if entry.kind == "command":
        return Preload(why_not="the entry is a command")
    try:
        scan = _scan(entry)
    except _EnvironmentChangesError as where:
        return Preload(why_not=str(where))
    if not scan.modules:
        return Preload(why_not="it imports neither torch nor numpy at its top level")
    if scan.may_train and any(_root(module) == "torch" for module in scan.modules):
        scan.modules["torch._dynamo"] = None  # an optimizer's first step imports it, and DDP
    return Preload(tuple(scan.modules))


def _scan(entry: Entry) -> _Scan:
    directories = tuple(Path(path) for path in entry.import_paths)
    where = entry.target.partition(":")[0] if entry.kind == "function" else entry.target
    if entry.kind == "script" or where.endswith(".py"):
        files = [Path(where)]
        directories = (*directories, Path(where).resolve().parent)
    else:
        directories = (*directories, Path(entry.working_dir))
        places = (Path(__file__).parents[2],) if _root(where) == "clusterddp" else directories
        # `python -m package` runs the package's __main__.
        main = f"{where}.__main__"
        files = list(_find_with_packages(main if _find_module(main, places) else where, places))
    scan = _Scan(directories)
    if _root(where) == "clusterddp":
        scan.modules[where.rpartition(".")[0]] = None  # `python -m` imports the package before the module
    for file in files:
        _read_file(file, scan)
    return scan


def _read_file(file: Path, scan: _Scan) -> None:
    """Add the imports of a file, and of the files of the same project that it imports."""
    if file in scan.seen or len(scan.seen) >= _MAX_FILES:
        return
    scan.seen.add(file)
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            return
        source = file.read_bytes()
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # the ranks report it
    scan.may_train |= any(word in source.lower() for word in (b"optim", b"parallel"))
    preloads = False
    for statement in tree.body:
        for module in _imported(statement, file, scan.search_dirs):
            root = _root(module)
            if root == "clusterddp" or (root in PRELOADABLE and _find_module(root, scan.search_dirs) is None):
                if module not in _NOT_PRELOADABLE:
                    scan.modules[module] = None
                    preloads = True
                scan.may_train |= module.startswith("clusterddp.train")
            else:
                files = tuple(_find_with_packages(module, scan.search_dirs))
                scan.may_train |= not files and root not in sys.stdlib_module_names
                for found in files:
                    _read_file(found, scan)
        changes = _find_environment_change(statement, at_import=not preloads)
        if changes is not None:
            raise _EnvironmentChangesError(f"{file.name}:{changes} changes os.environ, which an import may read")


def _imported(statement: ast.stmt, file: Path, directories: tuple[Path, ...]) -> Iterator[str]:
    """Name the modules that a statement imports; `from a import b` may mean the module a.b."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        base = statement.module or ""
        if statement.level:
            base = _absolute(base, statement.level, file, directories)
        if base:
            yield base
            named = (f"{base}.{alias.name}" for alias in statement.names)
            yield from (module for module in named if _find_module(module, directories))


def _absolute(base: str, level: int, file: Path, directories: tuple[Path, ...]) -> str:
    package = file.parents[level - 1]
    for directory in directories:
        if package != directory and package.is_relative_to(directory):
            return ".".join((*package.relative_to(directory).parts, *filter(None, [base])))
    return ""


def _root(module: str) -> str:
    return module.partition(".")[0]


def _find_with_packages(module: str, directories: tuple[Path, ...]) -> Iterator[Path]:
    """Find the files of a module and of its parent packages, which are imported first."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        found = _find_module(".".join(parts[:end]), directories)
        if found is not None:
            yield found


def _find_module(module: str, directories: tuple[Path, ...]) -> Path | None:
    for directory in directories:
        path = directory.joinpath(*module.split("."))
        for candidate in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if candidate.is_file():
                return candidate
    return None


def _find_environment_change(statement: ast.stmt, *, at_import: bool) -> int | None:
    """Return the line of a statement that changes, or may change, os.environ when the module is imported.

    `at_import`: a function counts, too: the module may call it before an import that reads the environment.
    """
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not at_import:
        return None
    for node in ast.walk(statement):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and _is_environ(node.value):
            return node.lineno
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method = node.func.attr
            changes_it = method in {"update", "setdefault", "pop", "clear"} and _is_environ(node.func.value)
            if changes_it or method in {"putenv", "unsetenv"}:
                return node.lineno
    return None


def _is_environ(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )
