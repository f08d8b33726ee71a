"""What a run was made of: its configuration, packages, code and hosts; two runs that differ are explained by these."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import RunDir
from clusterddp.run.record import RunRecord
from clusterddp.run.snapshot import find_stored
from clusterddp.spec.program_arguments import named_arguments
from clusterddp.spec.secret_values import HIDDEN, hide_secret_arguments, is_secret
from clusterddp.system.files import read_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Background:
    """What a run was made of; each part is empty where the run does not have its file."""

    config: Mapping[str, str]
    """The resolved spec, a key for each value: `train.lr` -> `0.1`."""
    packages: Mapping[str, str]
    machine: Mapping[str, str]
    """The machine that submitted: Python, torch, GPUs, driver."""
    places: Mapping[str, str]
    """Launcher, hosts, ranks, backend."""
    commit: str | None
    branch: str | None
    is_dirty: bool
    """The work tree had changes that were not committed."""
    root: Path | None
    """The work tree of the commit, on the machine that submitted."""
    code: Path | None
    """The snapshot of the code; None: the run has none, or it is not here."""


def read_background(run: RunDir, record: RunRecord) -> Background:
    """Read what a run was made of; a file that is missing or damaged leaves its part empty."""
    plan, environment = _object(run.plan), _object(run.environment)
    git = _inner(environment, "git")
    return Background(
        config=_relative(config_texts(_inner(plan, "spec")), plan.get("working_dir")),
        packages={str(name): str(version) for name, version in _inner(environment, "packages").items()},
        machine=_machine(environment),
        places=_places(record, _inner(plan, "gang")),
        commit=git["commit"] if isinstance(git.get("commit"), str) else None,
        branch=git["branch"] if isinstance(git.get("branch"), str) else None,
        is_dirty=git.get("dirty") is True,
        root=Path(git["root"]) if isinstance(git.get("root"), str) else None,
        code=find_stored(run),
    )


def config_texts(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Write nested values as texts, a key each, `train.lr`; unset ones are left out, secret ones hidden."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name == "entry" and isinstance(value, dict):
            flat |= config_texts(hide_secret_arguments(value), "entry.")
        elif isinstance(value, dict) and value and name.count(".") < 16:
            flat |= config_texts(value, f"{name}.")
        elif name == "entry.args" and (arguments := _arguments(value)):
            flat |= {f"{name}.{argument}": text for argument, text in arguments.items()}
        elif value not in (None, {}, []):
            hidden = prefix == "env." and is_secret(str(key), value_text(value))
            hidden |= name == "notify.webhook" and not str(value).startswith("${")
            flat[name] = HIDDEN if hidden else value_text(value)
    return flat


def _arguments(words: Any) -> dict[str, str] | None:
    """Write the arguments of a program one by one; None: they are not words, or cannot be distinguished."""
    return named_arguments(words) if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


def _relative(config: dict[str, str], directory: Any) -> dict[str, str]:
    """Write paths below the directory of the submit as relative ones: each upload to a login node has its own."""
    if not isinstance(directory, str) or not directory.strip("/"):
        return config
    return {key: value.removeprefix(f"{directory.rstrip('/')}/") for key, value in config.items()}


def value_text(value: Any) -> str:
    """Write a value of a spec in one line, text as it is."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _machine(environment: Mapping[str, Any]) -> dict[str, str]:
    python, torch = _inner(environment, "python"), _inner(environment, "torch")
    gpus = environment.get("gpus")
    gpus = [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    names = dict.fromkeys(str(gpu.get("name")) for gpu in gpus)
    facts = {
        "host": environment.get("host"),
        "platform": environment.get("platform"),
        "cpus": environment.get("cpus"),
        "python": python.get("version"),
        "torch": torch.get("version"),
        "cuda": torch.get("cuda"),
        "gpus": f"{len(gpus)} x {', '.join(names)}" if gpus else None,
        "driver": gpus[0].get("driver_version") if gpus else None,
        "directory": environment.get("working_dir"),
    }
    return {name: str(fact) for name, fact in facts.items() if fact is not None}


def _places(record: RunRecord, gang: Mapping[str, Any]) -> dict[str, str]:
    nodes = gang.get("nodes")
    nodes = [node for node in nodes if isinstance(node, dict)] if isinstance(nodes, list) else []
    ranks = [node["ranks"] for node in nodes if isinstance(node.get("ranks"), list)]
    facts = {
        "launcher": record.launcher,
        "hosts": ", ".join(dict.fromkeys(str(node.get("host")) for node in nodes)),
        "nodes": len(nodes),
        "ranks": sum(map(len, ranks)),
        "backend": gang.get("backend"),
        "threads per rank": gang.get("threads_per_rank"),
    }
    return {name: str(fact) for name, fact in facts.items() if fact not in (None, "", 0)}


def _object(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ClusterddpError):
        return {}
    return value if isinstance(value, dict) else {}


def _inner(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    inner = values.get(key)
    return inner if isinstance(inner, dict) else {}
