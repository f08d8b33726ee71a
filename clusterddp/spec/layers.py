"""What is laid over and under a spec: overrides of the command line; profiles, shared files.

Arguments follow Hydra's basic grammar: `train.lr=0.2` sets, `+env.NAME=1` sets as well (new or not), `~train.lr` resets
to the default. A value that begins with a quote, [ or { is YAML; any other, and one that begins with a placeholder such
as {output_dir}, is one scalar, byte for byte, as if it stood in the spec without quotes.

A profile says where to run, in the user's `config.yaml`; the spec has what to run:

profiles:
  lab: {launcher: slurm, slurm: {partition: gpu, account: vision}}
  hpc: {launcher: slurm, login: hpc-login}       # commands run on that host
  far: {launcher: slurm, login: {host: far, venv: ~/torch, runs_dir: /scratch/ana/runs}}
default_profile: lab

A project file `clusterddp.yaml` and the site file of a lab hold values for all specs:

launcher: slurm
slurm: {partition: gpu, account: vision}
env: {NCCL_DEBUG: WARN}
runs_dir: /scratch/{user}/runs       # from here, from / or from ~/
"""

from __future__ import annotations

import functools
import itertools
import os
import pwd
import re
import stat
from collections.abc import Iterable, Iterator
from collections.abc import Mapping as Map
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from clusterddp.errors import Problem, SpecError
from clusterddp.network.hostlist import expand
from clusterddp.spec.tree import (
    ListNode,
    Mapping,
    Node,
    Place,
    Scalar,
    decode,
    describe,
    did_you_mean,
    is_null,
    problem_at,
    read_bytes,
    show,
    spec_error,
    without,
)
from clusterddp.system.own_directory import account_name, other_writers

if TYPE_CHECKING:
    from clusterddp.spec.hosts import Login


COMMAND_LINE = "command line"
MAX_ARGUMENT_SHOWN = 80

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+){0,19}")
"""The deepest key, as for the nesting of a spec (yamlfile.py)."""
_PLACEHOLDER = re.compile(r"\{[a-z][a-z0-9_]*\}|\{\{[a-z][a-z0-9_]*\}\}")
_OPTIONS = {("device", "cpu"): "--cpu"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """One value for one key; without a node the key is reset to its default."""

    path: tuple[str, ...]
    node: Node | None
    place: Place
    problems: tuple[Problem, ...] = ()
    """Of a hostfile: what is wrong in its lines."""

    def as_tree(self) -> Mapping:
        """Return a tree that holds only this value; for a reset, an empty scalar."""
        node = self.node or Scalar(text="", quoted=False, place=self.place)
        for part in reversed(self.path):
            node = Mapping(entries={part: node}, keys={part: self.place}, place=self.place)
        assert isinstance(node, Mapping)
        return node


def parse_argument(argument: str) -> Override:
    """Parse `key=value`, `+key=value` or `~key`. Raises: SpecError."""
    shown = argument if len(argument) <= MAX_ARGUMENT_SHOWN else argument[: MAX_ARGUMENT_SHOWN - 3] + "..."
    place = Place(source=f"{shown} ({COMMAND_LINE})", origin=COMMAND_LINE)
    key, equals, value = argument.partition("=")
    reset = key.startswith("~")
    key = key[1:] if reset or key.startswith("+") else key
    if reset and equals:
        raise spec_error(place, "a key is reset without a value", f"~{key}")
    if not _KEY.fullmatch(key) or not (reset or equals):
        hint = "a command takes one spec" if argument.endswith((".yaml", ".yml")) else None
        raise spec_error(place, "expected key=value, for example train.lr=0.2, or ~key for the default", hint)
    node = None if reset else _parse_text(value, key, place)
    return Override(path=tuple(key.split(".")), node=node, place=place)


def from_options(options: Map[str, str]) -> list[Override]:
    """Make overrides of the command's own options, such as `{"launcher": "local"}` for --launcher local."""
    overrides = []
    for key, value in options.items():
        option = _OPTIONS.get((key, value), "--" + key.replace("_", "-"))
        place = Place(source=option, origin=option)
        node = Scalar(text=value, quoted=False, place=place)
        overrides.append(Override(path=tuple(key.split(".")), node=node, place=place))
    return overrides


def _parse_text(value: str, key: str, place: Place) -> Node:
    if value[:1] in ("[", "{", '"', "'") and not _PLACEHOLDER.match(value):
        from clusterddp.spec.yamlfile import parse_value  # commands that only look at runs do without YAML

        try:
            return parse_value(value, place) or Scalar(text="", quoted=False, place=place)
        except SpecError as error:
            message = f"cannot be read as YAML: {error.problems[0].message}"
            raise spec_error(place, message, error.problems[0].hint, key=key) from error
    if "," in value:
        raise spec_error(
            place,
            f"found several values, {show(value)}, expected one",
            "--sweep makes a run of each; a text with a comma stands in double quotes inside of the shell's: "
            f"{key}='{show(value)}'",
            key=key,
        )
    return Scalar(text=value, quoted=False, place=place)


CONFIG_VARIABLE = "CLUSTERDDP_CONFIG"
_KEYS = ("profiles", "default_profile")
_LOGIN = "login"


def config_path(environ: Map[str, str]) -> Path | None:
    """Return the path of the user's configuration; None: CLUSTERDDP_CONFIG is empty, or no home directory is known."""
    if CONFIG_VARIABLE in environ:
        return Path(environ[CONFIG_VARIABLE]) if environ[CONFIG_VARIABLE] else None
    if "HOME" not in environ and "XDG_CONFIG_HOME" not in environ:
        return None
    return platformdirs.user_config_path("clusterddp") / "config.yaml"


def read_profile(environ: Map[str, str], name: str | None) -> Mapping | None:
    """Read the values of the profile `name`, or the default one, for specs; None when neither is given."""
    _, profile = _find(environ, name)
    return without(profile, (_LOGIN,)) if profile else None


def read_profile_login(environ: Map[str, str], name: str | None) -> tuple[str, Login] | None:
    """Read the name and the login node of the profile `name`, or of the default one; None when it has none."""
    chosen, profile = _find(environ, name)
    if profile is None or _LOGIN not in profile.entries:
        return None
    # A command without a login node must not wait for pydantic to load.
    from clusterddp.spec.check import check_section
    from clusterddp.spec.hosts import Login

    node, place, key = profile.entries[_LOGIN], profile.keys[_LOGIN], f"profiles.{chosen}.{_LOGIN}"
    if isinstance(node, Scalar) and not node.null:
        node = Mapping(entries={"host": node}, keys={"host": place}, place=place)
    if not isinstance(node, Mapping):
        raise spec_error(place, f"found {describe(node)}, expected the name of a host", key=key)
    if "host" not in node.entries:
        raise spec_error(place, "names no host, expected host: NAME", key=key)
    login, problems = check_section(node, Login, key)
    if login is None:
        raise SpecError(tuple(problems))
    several = len(expand(login.host)) != 1
    wrong = f"{login.host} is a set of hosts, expected one" if several else login.python_problem
    if wrong:
        raise spec_error(place, wrong, key=key)
    return chosen, login


def _find(environ: Map[str, str], name: str | None) -> tuple[str, Mapping | None]:
    """Find the profile `name`, or the default one, and its name."""
    path = config_path(environ)
    if path is None or not (path.exists() or CONFIG_VARIABLE in environ):
        if name is not None:
            raise _unknown(Place(source=f"--profile {name}"), name, [], path)
        return "", None
    from clusterddp.spec.yamlfile import parse  # yaml, which a command without such a file does not wait for

    text = decode(read_bytes(path), str(path))
    profiles, default = _read_config(parse(text, str(path), may_be_empty=True))
    place = Place(source=f"--profile {name}")
    if name is None:
        if default is None:
            return "", None
        name, place = default.text, default.place
    if name not in profiles:
        raise _unknown(place, name, sorted(profiles), path)
    labelled = parse(text, str(path), origin=f"profile {name}").entries["profiles"]
    chosen = labelled.entries[name] if isinstance(labelled, Mapping) else None
    return name, chosen if isinstance(chosen, Mapping) else None


def _read_config(config: Mapping) -> tuple[dict[str, Place], Scalar | None]:
    """Check the configuration's own keys; returns the profiles' names with their places, and the default's name."""
    problems: list[Problem] = [
        problem_at(place, f"unknown key{did_you_mean(key, _KEYS)}", key=key)
        for key, place in config.keys.items()
        if key not in _KEYS
    ]
    default, profiles = config.entries.get("default_profile"), config.entries.get("profiles")
    for key, node, form, expected in (
        ("default_profile", default, Scalar, "the name of a profile"),
        ("profiles", profiles, Mapping, "a mapping of names to profiles"),
    ):
        if not is_null(node) and not isinstance(node, form):
            problems.append(problem_at(config.keys[key], f"found {describe(node)}, expected {expected}", key=key))
    names = profiles.keys if isinstance(profiles, Mapping) else {}
    for name, profile in profiles.entries.items() if isinstance(profiles, Mapping) else ():
        if not is_null(profile) and not isinstance(profile, Mapping):
            message = f"found {describe(profile)}, expected keys and values of a spec"
            problems.append(problem_at(profile.place, message, key=f"profiles.{name}"))
    if problems:
        raise SpecError(tuple(problems))
    return names, default if isinstance(default, Scalar) and not default.null else None


def _unknown(place: Place, name: str, names: list[str], path: Path | None) -> SpecError:
    known = f"there are: {', '.join(names)}" if names else "there are none"
    where = f" ({path})" if path is not None else ""
    message = f"no profile {describe(name)}; {known}{where}{did_you_mean(name, names)}"
    return spec_error(place, message)


PROJECT_FILE = "clusterddp.yaml"
PROJECT_VARIABLE = "CLUSTERDDP_PROJECT"
SITE_FILE = Path("/etc/clusterddp/site.yaml")
SITE_VARIABLE = "CLUSTERDDP_SITE"
RUNS_DIR = "runs_dir"
RUNS_VARIABLE = "CLUSTERDDP_RUNS"
RUNS_DIR_DESCRIPTION = (
    "Directory of the runs, where --runs and CLUSTERDDP_RUNS name none: from this file, from / or from ~/; {user} is "
    "the name of the user. Commands take that of the working directory's project."
)
ALLOWED = (
    *("launcher", "device", "resources", "network", "stop", "env", "secrets", "restarts", "elastic"),
    *("hang", "hang_after", "snapshot", "train", "slurm", "container", "ssh", "python", "venv", "conda", "setup"),
)
"""The keys of a spec that a shared file may set. Which Python there is is a fact of the machines: without it a file
could not describe them. A key that is not listed is refused, so that a new one is decided on."""
_CODE = ("entry", "notify")
_OF_NO_PROJECT = ("secrets", "python", "venv", "conda", "setup")
"""Keys that a project file may not set: it may come with another's code, and these run programs or name secrets."""


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
        return read_shared_files(environ, Path.cwd()).runs_dir or Path("runs")
    except SpecError as error:
        raise SpecError(error.problems, "so the runs directory is not known: --runs DIR names it") from error


def find_project_file(environ: Map[str, str], directory: Path, *, spec: Path | None = None) -> Path | None:
    """Find `clusterddp.yaml` in a directory or above it: up to the root of the git repository or the home directory.

    With neither above, as far up as the directories belong to this user and no other user can write to them.
    """

    def is_own(directory: Path) -> bool:
        found = directory.stat()
        return found.st_uid == os.geteuid() and not found.st_mode & stat.S_IWOTH

    home = Path(environ["HOME"]).resolve() if environ.get("HOME") else None
    places = [directory.resolve(), *directory.resolve().parents]
    ends = [index for index, place in enumerate(places) if place == home or _exists(place / ".git")]
    above: Iterable[Path] = places[1 : ends[0] + 1] if ends else itertools.takewhile(is_own, places[1:])
    own = spec.absolute() if spec else None
    for place in (places[0], *above):
        path = place / PROJECT_FILE
        if os.path.lexists(path) and not (own and _exists(path) and _exists(own) and path.samefile(own)):
            return path
    return None


def refusals(tree: Mapping, *, is_project: bool) -> Iterator[Problem]:
    """Yield a problem for each key that a shared file may not set; `tree`: with one spelling for each key.

    A project file comes with a repository: which secrets go where, and to whom, is not for its author to say.
    """
    for key, place in tree.keys.items():
        if key not in ALLOWED:
            why = "it names code that runs, and" if key in _CODE else "it is for one spec, and"
            message = f"belongs in a spec: {why} this file holds for all specs"
            hint = f"is this a spec? A file of another name than {PROJECT_FILE} is none for a project"
            named = Path(place.source).name == PROJECT_FILE
            yield problem_at(place, message, hint if named else None, key=key)
    if is_project:
        ssh = tree.entries.get("ssh")
        hosts = ssh.entries.get("hosts") if isinstance(ssh, Mapping) else None
        items = [item for item in hosts.items if isinstance(item, Mapping)] if isinstance(hosts, ListNode) else []
        of_spec = [(key, tree) for key in _OF_NO_PROJECT]
        for key, node in (*of_spec, *(("ssh.hosts.host_key", item) for item in items)):
            if found := node.keys.get(key.rpartition(".")[2]):
                message = "belongs in a spec, a profile or the site file: a project file may come with another's code"
                yield problem_at(found, message, key=key)


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
        message = f"belongs to {account_name(owners.pop())}, expected your own file or root's: its values are not used"
        raise spec_error(place, message, f"a copy of your own counts{without_it}")
    if other_writers(found) is not None:
        message = f"can be written by other users (mode {stat.S_IMODE(found.st_mode):04o}): its values are not used"
        raise spec_error(place, message, f"chmod go-w {path}{without_it}")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # in a directory that this user cannot search
        return False


def _read_runs_dir(tree: Mapping, path: Path) -> Path | None:
    node = tree.entries.get(RUNS_DIR)
    if is_null(node):
        return None
    if not isinstance(node, Scalar):
        raise spec_error(tree.keys[RUNS_DIR], f"found {describe(node)}, expected a directory", key=RUNS_DIR)
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name if "{user}" in node.text else ""
        return Path(os.path.normpath(path.absolute().parent / Path(node.text.replace("{user}", user)).expanduser()))
    except (RuntimeError, KeyError) as error:
        raise spec_error(node.place, f"found {describe(node)}, and no such user is known", key=RUNS_DIR) from error
