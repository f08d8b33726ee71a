"""Values that several specs share: the project's file `clusterddp.yaml`, and the site file of all users of a lab.

launcher: slurm
slurm: {partition: gpu, account: vision}
env: {NCCL_DEBUG: WARN}
runs_dir: /scratch/{user}/runs       # from here, from / or from ~/
"""

from __future__ import annotations

import functools
import grp
import itertools
import os
import pwd
import stat
from collections.abc import Iterable, Iterator
from collections.abc import Mapping as Map
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import Problem, SpecError
from clusterddp.spec.problems import problem_at, spec_error
from clusterddp.spec.textfile import decode, read_bytes
from clusterddp.spec.tree import Mapping, Place, Scalar, describe, without

PROJECT_FILE = "clusterddp.yaml"
PROJECT_VARIABLE = "CLUSTERDDP_PROJECT"
SITE_FILE = Path("/etc/clusterddp/site.yaml")
SITE_VARIABLE = "CLUSTERDDP_SITE"
RUNS_DIR = "runs_dir"
RUNS_VARIABLE = "CLUSTERDDP_RUNS"
_DEFAULT_RUNS = "runs"
RUNS_DIR_DESCRIPTION = (
    "Directory of the runs, where --runs and CLUSTERDDP_RUNS name none: from this file, from / or from ~/; {user} is "
    "the name of the user. Commands take that of the working directory's project."
)
ALLOWED = (
    *("launcher", "device", "resources", "network", "stop", "env", "secrets", "restarts", "hang", "hang_after"),
    *("keep", "snapshot", "train", "slurm", "container", "ssh"),
)
"""The keys of a spec that a shared file may set. `ssh` and `container` name a Python, which is a fact of the machines:
without it a file could not describe them. A key that is not listed is refused, so that a new one is decided on."""
_CODE = ("entry", "notify")


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedFile:
    """A project file or a site file, read."""

    path: Path
    tree: Mapping
    """Its values for specs."""
    text: str
    runs_dir: Path | None
    """The directory of the runs."""

    @property
    def name(self) -> str:
        """Its name in messages and origins."""
        return self.tree.place.source


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedFiles:
    """The files that are found for a spec, or for a directory."""

    site: SharedFile | None = None
    project: SharedFile | None = None

    def __iter__(self) -> Iterator[SharedFile]:
        """Yield those that exist, the one that is overridden first."""
        yield from (file for file in (self.site, self.project) if file is not None)

    @property
    def runs_dir(self) -> Path | None:
        return next((file.runs_dir for file in reversed(tuple(self)) if file.runs_dir), None)


def read_shared_files(environ: Map[str, str], directory: Path, *, spec: Path | None = None) -> SharedFiles:
    """Read the site file, and the project file of a directory; `spec`: the spec itself is no project file.

    Raises: SpecError: a file cannot be read, is not YAML, or belongs to another user or can be written by others.
    """
    site = _named(environ, SITE_VARIABLE, SITE_FILE if _exists(SITE_FILE) else None)
    found = None if PROJECT_VARIABLE in environ else find_project_file(environ, directory, spec=spec)
    project = _named(environ, PROJECT_VARIABLE, found)
    return SharedFiles(
        site=_read(site, SITE_VARIABLE) if site else None,
        project=_read(project, PROJECT_VARIABLE) if project else None,
    )


def default_runs_dir(environ: Map[str, str]) -> Path:
    """Return where runs lie without --runs.

    Raises: SpecError: the project file or the site file cannot be used.
    """
    if named := environ.get(RUNS_VARIABLE):
        return Path(named)
    try:
        return read_shared_files(environ, Path.cwd()).runs_dir or Path(_DEFAULT_RUNS)
    except SpecError as error:
        raise SpecError(error.problems, "so the runs directory is not known: --runs DIR names it") from error


def find_project_file(environ: Map[str, str], directory: Path, *, spec: Path | None = None) -> Path | None:
    """Find `clusterddp.yaml` in a directory or above it: up to the root of the git repository or the home directory.

    With neither above, as far up as the directories belong to this user and no other user can write to them.
    """
    home = Path(environ["HOME"]).resolve() if environ.get("HOME") else None
    places = [directory.resolve(), *directory.resolve().parents]
    ends = [index for index, place in enumerate(places) if place == home or _exists(place / ".git")]
    above: Iterable[Path] = places[1 : ends[0] + 1] if ends else itertools.takewhile(_is_own, places[1:])
    own = spec.absolute() if spec else None
    for place in (places[0], *above):
        path = place / PROJECT_FILE
        if os.path.lexists(path) and not (own and _is_same(path, own)):
            return path
    return None


def refusals(tree: Mapping) -> Iterator[Problem]:
    """Yield a problem for each key that a shared file may not set; `tree`: with one spelling for each key."""
    for key, place in tree.keys.items():
        if key not in ALLOWED:
            why = "it names code that runs, and" if key in _CODE else "it is for one spec, and"
            message = f"belongs in a spec: {why} this file holds for all specs"
            hint = f"is this a spec? A file of another name than {PROJECT_FILE} is none for a project"
            named = Path(place.source).name == PROJECT_FILE
            yield problem_at(place, message, hint if named else None, key=key)


def _named(environ: Map[str, str], variable: str, default: Path | None) -> Path | None:
    """Return the path that a variable names; an empty one: none."""
    if variable not in environ:
        return default
    return Path(environ[variable]).expanduser() if environ[variable] else None


def _read(path: Path, variable: str) -> SharedFile:
    """Read a shared file, if it can be trusted."""
    from clusterddp.spec.yamlfile import parse  # yaml, which a command without such a file does not wait for

    near = path.is_absolute() and path.parent == Path.cwd()
    place = Place(source=path.name if near else str(path))
    text = decode(read_bytes(path, check=functools.partial(_refuse_stranger, path, place, variable)), place.source)
    tree = parse(text, place.source, may_be_empty=True)
    return SharedFile(path=path, tree=without(tree, (RUNS_DIR,)), text=text, runs_dir=_read_runs_dir(tree, path))


def _refuse_stranger(path: Path, place: Place, variable: str, found: os.stat_result) -> None:
    """Raises: SpecError: another user wrote the file, or can write it."""
    without_it = f"; {variable}= (empty) goes without it"
    owners = {found.st_uid, os.lstat(path).st_uid} - {0, os.geteuid()}
    if owners:
        message = f"belongs to {_user_name(owners.pop())}, expected a file of yours or root's: its values are not used"
        raise spec_error(place, message, f"a copy of your own counts{without_it}")
    others = stat.S_IWOTH | (0 if _is_private_group(found) else stat.S_IWGRP)
    if found.st_mode & others:
        message = f"can be written by other users (mode {stat.S_IMODE(found.st_mode):04o}): its values are not used"
        raise spec_error(place, message, f"chmod go-w {path}{without_it}")


def _is_private_group(found: os.stat_result) -> bool:
    """Return whether the file's group has its owner's name and no other member, as where each user has a group."""
    try:
        group, owner = grp.getgrgid(found.st_gid), pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        return False
    return group.gr_name == owner and set(group.gr_mem) <= {owner}


def _is_same(path: Path, spec: Path) -> bool:
    return _exists(path) and _exists(spec) and path.samefile(spec)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # in a directory that this user cannot search
        return False


def _is_own(directory: Path) -> bool:
    found = directory.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & stat.S_IWOTH


def _user_name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _read_runs_dir(tree: Mapping, path: Path) -> Path | None:
    node = tree.entries.get(RUNS_DIR)
    if node is None or (isinstance(node, Scalar) and node.null):
        return None
    if not isinstance(node, Scalar):
        raise spec_error(tree.keys[RUNS_DIR], f"found {describe(node)}, expected a directory", key=RUNS_DIR)
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name if "{user}" in node.text else ""
        return Path(os.path.normpath(path.absolute().parent / Path(node.text.replace("{user}", user)).expanduser()))
    except (RuntimeError, KeyError) as error:
        raise spec_error(node.place, f"found {describe(node)}, and no such user is known", key=RUNS_DIR) from error
