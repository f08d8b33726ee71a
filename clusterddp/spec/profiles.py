"""Profiles: where to run, in the user's `config.yaml`; the spec has what to run.

profiles:
  lab: {launcher: slurm, slurm: {partition: gpu, account: vision}}
  hpc: {launcher: slurm, login: hpc-login}       # commands run on that host
  far: {launcher: slurm, login: {host: far, venv: ~/torch, runs_dir: /scratch/ana/runs}}
default_profile: lab
"""

from __future__ import annotations

from collections.abc import Mapping as Map
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from clusterddp.errors import Problem, SpecError
from clusterddp.network.hostlist import expand
from clusterddp.spec.problems import did_you_mean, problem_at, spec_error
from clusterddp.spec.textfile import decode, read_bytes
from clusterddp.spec.tree import Mapping, Node, Place, Scalar, describe, without
from clusterddp.spec.yamlfile import parse

if TYPE_CHECKING:
    from clusterddp.spec.ssh_section import Login

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
    """Read the values of the profile `name`, or the default one, for specs; None when neither is given.

    Raises: SpecError: no such profile, or the configuration is wrong.
    """
    _, profile = _find(environ, name)
    return without(profile, (_LOGIN,)) if profile else None


def read_profile_login(environ: Map[str, str], name: str | None) -> tuple[str, Login] | None:
    """Read the name and the login node of the profile `name`, or of the default one; None when it has none.

    Raises: SpecError: no such profile, or the configuration is wrong.
    """
    chosen, profile = _find(environ, name)
    if profile is None or _LOGIN not in profile.entries:
        return None
    return chosen, _read_login(profile.entries[_LOGIN], profile.keys[_LOGIN], f"profiles.{chosen}.{_LOGIN}")


def _read_login(node: Node, place: Place, key: str) -> Login:
    """Read a profile's login node: a mapping, or only the host's name. `place`: of its key."""
    # A command without a login node must not wait for pydantic to load.
    from clusterddp.spec.check import check_section
    from clusterddp.spec.ssh_section import Login

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
    return login


def _find(environ: Map[str, str], name: str | None) -> tuple[str, Mapping | None]:
    """Find the profile `name`, or the default one, and its name."""
    path = config_path(environ)
    if path is None or not (path.exists() or CONFIG_VARIABLE in environ):
        if name is not None:
            raise _unknown(Place(source=f"--profile {name}"), name, [], path)
        return "", None
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
    default = config.entries.get("default_profile")
    if isinstance(default, Scalar) and default.null:
        default = None
    if default is not None and not isinstance(default, Scalar):
        message = f"found {describe(default)}, expected the name of a profile"
        problems.append(problem_at(config.keys["default_profile"], message, key="default_profile"))
        default = None
    profiles = config.entries.get("profiles")
    names: dict[str, Place] = {}
    if isinstance(profiles, Mapping):
        names = profiles.keys
        for name, profile in profiles.entries.items():
            if not isinstance(profile, Mapping) and not (isinstance(profile, Scalar) and profile.null):
                message = f"found {describe(profile)}, expected keys and values of a spec"
                problems.append(problem_at(profile.place, message, key=f"profiles.{name}"))
    elif profiles is not None and not (isinstance(profiles, Scalar) and profiles.null):
        message = f"found {describe(profiles)}, expected a mapping of names to profiles"
        problems.append(problem_at(config.keys["profiles"], message, key="profiles"))
    if problems:
        raise SpecError(tuple(problems))
    return names, default


def _unknown(place: Place, name: str, names: list[str], path: Path | None) -> SpecError:
    known = f"there are: {', '.join(names)}" if names else "there are none"
    where = f" ({path})" if path is not None else ""
    message = f"no profile {describe(name)}; {known}{where}{did_you_mean(name, names)}"
    return spec_error(place, message)
