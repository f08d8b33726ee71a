"""Checks a tree and makes a JobSpec: the model types values, the rules compare them, each error gets its place."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Mapping as Map
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from clusterddp.errors import Problem
from clusterddp.spec.entry_section import EntrySpec, entry_conflicts, started_by, starter_conflict
from clusterddp.spec.fields import MAX_RANKS, Conflict
from clusterddp.spec.hosts import ssh_conflicts, with_node_for_each_host
from clusterddp.spec.keys import with_one_spelling
from clusterddp.spec.launchers import commands_in, commands_started, find_starter, script_of
from clusterddp.spec.model import JobSpec, elastic_conflicts, notify_conflicts
from clusterddp.spec.slurm_options import (
    GPU_OPTIONS,
    MEMORY_OPTIONS,
    REQUEUE_OPTIONS,
    GpuRequest,
    asks_for_gpus,
    option_problem,
    read_gpu_request,
)
from clusterddp.spec.train import BUILT_IN, FOLDER, IMAGE_SETS, fits_fastnet, kept_side, own_side
from clusterddp.spec.tree import (
    ListNode,
    Mapping,
    Node,
    Place,
    Scalar,
    describe,
    did_you_mean,
    near_file,
    problem_at,
    to_data,
    without,
)
from clusterddp.system.storage import HOST_SILENCE_S
from clusterddp.system.units import format_count

if TYPE_CHECKING:
    from clusterddp.spec.model import JobSpec
    from clusterddp.spec.train import TrainSpec


_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_Model = TypeVar("_Model", bound=BaseModel)
_KINDS = {
    "model_type": "a mapping",
    "dataclass_type": "a mapping",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
}


More = Callable[[JobSpec], Iterable[Conflict]]
"""Finds conflicts that are not in the spec alone."""


def check(tree: Mapping, more: More = lambda job: ()) -> tuple[JobSpec | None, list[Problem]]:
    """Type a tree whose keys are known; return a job, or problems."""
    job, details = _typed(JobSpec, to_data(tree))
    problems = [_field_problem(tree, detail) for detail in details]
    wrong = [_named_part(detail["loc"]) for detail in details]
    if job is None:
        # Valid values may still conflict: the rules check a spec without the invalid ones.
        job, _ = _typed(JobSpec, {"name": "unnamed"} | to_data(functools.reduce(without, wrong, tree)))
    job = job and _with_gpus_of_slurm(with_node_for_each_host(job))
    for conflict in (*_conflicts(job), *more(job)) if job else ():
        paths = [tuple(key.split(".")) for key in conflict.keys]
        if not any(_touches(path, other) for path in paths for other in wrong):
            problems.append(problem_of(conflict, tree))
    return (None, problems) if problems else (job, [])


def problem_of(conflict: Conflict, tree: Mapping) -> Problem:
    """Make the problem of values that conflict, at the first of them that is written."""
    paths = [tuple(key.split(".")) for key in conflict.keys]
    written = next((path for path in paths if _locate(tree, path)[2] == len(path)), paths[0])
    return problem_at(_locate(tree, written)[1], conflict.message, conflict.hint, key=conflict.keys[0])


def check_section(tree: Mapping, model: type[_Model], key: str) -> tuple[_Model | None, list[Problem]]:
    """Type a mapping that is not part of a spec; `key`: its dotted key, for messages."""
    problems: list[Problem] = []
    known = with_one_spelling(tree, problems, model, tuple(key.split(".")))
    typed, details = _typed(model, to_data(known))
    found = [_field_problem(known, detail) for detail in details]
    problems += [dataclasses.replace(each, key=f"{key}.{each.key}") for each in found]
    return (None, problems) if problems else (typed, [])


def _with_gpus_of_slurm(job: JobSpec) -> JobSpec:
    """Return a spec for Slurm with as many GPUs on each node as its options of sbatch ask for, unless it has a number.

    So the number of ranks follows them.
    """
    resources, request = job.resources, read_gpu_request(job.slurm)
    own = job.entry is not None and job.entry.batch_script is not None
    if job.launcher != "slurm" or own or resources.gpus_per_node is not None or request is None:
        return job
    gpus = _gpus_on_node(request, job)
    if not gpus:
        return job
    return job.model_copy(update={"resources": resources.model_copy(update={"gpus_per_node": gpus})})


def _gpus_on_node(request: GpuRequest, job: JobSpec) -> int | None:
    """Return how many GPUs Slurm gives on each node; None: not known, or not as many on each.

    A number for each task says how many ranks there are only where it is 1: a rank usually computes on one GPU.
    """
    resources = job.resources
    named = resources.procs_per_node or resources.gpus_per_node
    gpus = request.on_node(nodes=resources.nodes, tasks=named or (1 if request.count == 1 else None))
    return int(gpus) if gpus is not None and gpus.denominator == 1 else None


def _typed(model: type[_Model], data: dict[str, Any]) -> tuple[_Model | None, list[ErrorDetails]]:
    """Type the data with pydantic; return a model, or errors."""
    try:
        return model.model_validate(data), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


def _named_part(loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return the location up to the first list index."""
    return tuple(str(part) for part in itertools.takewhile(lambda part: isinstance(part, str) and part != "[key]", loc))


def _touches(path: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Return whether one key contains the other."""
    return all(part == its for part, its in zip(path, other, strict=False))


def _field_problem(tree: Mapping, detail: ErrorDetails) -> Problem:
    is_key = detail["loc"][-1] == "[key]"
    loc = detail["loc"][:-1] if is_key else detail["loc"]
    node, place, _ = _locate(tree, loc, of_key=is_key)
    message, hint = _words(detail, node)
    return problem_at(place, message, hint, key=".".join(map(str, loc)))


def _words(detail: ErrorDetails, node: Node | None) -> tuple[str, str | None]:
    """Return clusterddp's message and hint for an error of pydantic."""
    kind, context = detail["type"], detail.get("ctx", {})
    found = describe(node if isinstance(node, Scalar) else detail["input"])
    written = node.text if isinstance(node, Scalar) else ""
    if kind == "clusterddp":
        return context["message"], context["hint"]
    if kind == "missing":
        return f"missing, expected {'`name: my-run`' if detail['loc'] == ('name',) else 'a value'}", None
    if kind in _BOUNDS:
        name, bound = _BOUNDS[kind]
        return f"found {found}, expected {bound} {float(context[name]):.12g}", None
    if kind == "literal_error":
        choices = re.findall("'([^']*)'", context["expected"])
        no = "none" in choices and (node is None or written.lower() in {"no", "off", "false", "null", "~", ""})
        meant = "" if no else did_you_mean(written, choices)
        expected = ", ".join(choices[:-1]) + f" or {choices[-1]}{meant}"
        return f"found {found}, expected {expected}", "write none" if no else None
    if kind in _KINDS:
        simple = _KINDS[kind] == "a list" and re.fullmatch(r"[\w./=-]{1,40}( [\w./=-]{1,40}){0,9}", written)
        hint = f"write [{', '.join(written.split())}]" if simple else None
        return f"found {found}, expected {_KINDS[kind]}", hint
    return f"found {found}, expected something else ({kind})", None


def _locate(tree: Mapping, loc: tuple[int | str, ...], *, of_key: bool = False) -> tuple[Node | None, Place, int]:
    """Find the node at `loc`, or the nearest one around it; returns it, its place, and how many parts were found.

    A mapping or list in block style begins in the line below its key: then the key is the place.
    """
    node: Node = tree
    place = Place(source=tree.place.source, origin=tree.place.origin)
    for depth, part in enumerate(loc):
        if isinstance(node, Mapping) and isinstance(part, str) and part in node.entries:
            key_place, node = node.keys[part], node.entries[part]
            place = node.place if isinstance(node, Scalar) and not of_key else key_place
        elif isinstance(node, ListNode) and isinstance(part, int | str) and str(part).isdecimal():
            node = node.items[int(part)]
            place = node.place
        else:
            return (node if isinstance(node, Scalar) else None), place, depth
    return node, place, len(loc)


def _conflicts(job: JobSpec) -> Iterator[Conflict]:
    """Find the values of `job` that conflict."""
    if job.train is not None and job.entry is not None:
        yield Conflict(
            ("entry", "train"),
            "a spec has either train or entry, this one has both",
            "~train or ~entry on the command line drops one of them",
        )
    if job.entry is not None and job.entry.batch_script is not None:
        yield from _batch_script_conflicts(job, job.entry)
    elif job.entry is not None:
        in_step = job.launcher == "slurm" and job.container is None
        yield from entry_conflicts(job.entry, world_size=job.resources.world_size, in_step=in_step)
    if job.train is not None:
        yield from _train_conflicts(job.train, job)
    yield from _python_conflicts(job)
    yield from _machine_conflicts(job)
    for index, name in enumerate(job.secrets):
        if name in job.env:
            yield Conflict((f"env.{name}",), "is also under secrets; a secret has no value in the spec")
        if name in job.secrets[:index]:
            yield Conflict((f"secrets.{index}",), f"{name} is named twice")
    yield from _slurm_conflicts(job)
    yield from ssh_conflicts(job)
    yield from notify_conflicts(job)
    yield from elastic_conflicts(job)


_MAX_SHELL_SCRIPT = 1 << 16
"""Bytes of a shell script that are read."""
_SHELL_SCRIPT = re.compile(r"#!.*\b(ba|da|z|k)?sh\b|(?!#!)[^\0]*\Z")


def conflicts_here(job: JobSpec, *, working_dir: Path, environ: Map[str, str]) -> Iterator[Conflict]:
    """Find what a submit from here contradicts: the script or a secret is not there, a script starts launchers."""
    if job.entry is not None and (job.launcher != "ssh" or job.snapshot):
        function_file = (job.entry.function or "").partition(":")[0]
        for name, file in (("script", job.entry.script), ("function", function_file)):
            path = working_dir / Path(file or "").expanduser()
            if file and (name == "script" or file.endswith(".py")) and not path.is_file():
                found = "is a directory" if path.is_dir() else f"no such file{near_file(path)}"
                hint = "the path is relative to the directory of the submit; entry.module names a module instead"
                yield Conflict((f"entry.{name}",), f"{path}: {found}", hint)
    for name in job.all_secrets:
        if name not in environ:
            key = f"secrets.{job.secrets.index(name)}" if name in job.secrets else "notify.webhook"
            hint = f"export {name}=..., then submit; only the name is stored in the run"
            yield Conflict((key,), f"{name} is not set in this environment", hint)
    if job.entry is not None and job.entry.command:
        yield from _starting_scripts(job, job.entry, working_dir)


def _starting_scripts(job: JobSpec, entry: EntrySpec, working_dir: Path) -> Iterator[Conflict]:
    """Find a shell script that starts a launcher in each rank; what it does under a condition does not count."""
    in_step = job.launcher == "slurm" and job.container is None
    started = (each for words in started_by(entry) for each in commands_started(words))
    for file in filter(None, map(script_of, started)):
        text = ""
        with contextlib.suppress(OSError):  # it may be there where the ranks run
            text = (working_dir / Path(file).expanduser()).read_bytes()[:_MAX_SHELL_SCRIPT].decode(errors="replace")
        if not _SHELL_SCRIPT.match(text):
            continue
        for command in (each for words in commands_in(text, always=True) for each in commands_started(words)):
            starter, size = find_starter(command), job.resources.world_size
            if starter and (found := starter_conflict(starter, entry, size, in_step=in_step, file=file)):
                yield found
                return


_OF_A_BATCH_SCRIPT = {"name", "launcher", "device", "network", "hang", "hang_after", "entry", "slurm"}


def _batch_script_conflicts(job: JobSpec, entry: EntrySpec) -> Iterator[Conflict]:
    """Find what a batch script says itself."""
    for name in entry.model_dump(exclude={"batch_script", "args"}, exclude_defaults=True):
        yield Conflict((f"entry.{name}", "entry.batch_script"), "a batch script has arguments, and nothing else")
    plain = JobSpec.model_validate({"name": job.name, "entry": {}})
    for name in type(job).model_fields:
        if name not in _OF_A_BATCH_SCRIPT and getattr(job, name) != getattr(plain, name):
            hint = "slurm.KEY=VALUE overrides a #SBATCH line: slurm.nodes=2, slurm.time=10"
            yield Conflict((name, "entry.batch_script"), "the batch script has it", hint)
    if job.launcher == "ssh":
        hint = "--launcher local tries it on this machine"
        yield Conflict(("launcher", "entry.batch_script"), "a batch script is for Slurm", hint)


def _python_conflicts(job: JobSpec) -> Iterator[Conflict]:
    """Find keys that choose no one Python for the ranks."""
    named = [name for name in ("python", "venv", "conda") if getattr(job, name)]
    if len(named) > 1:
        yield Conflict(tuple(reversed(named)), f"the spec has {' and '.join(named)}, expected one of them")
    for name in named:
        if job.container and name != "python":
            hint = "python: /opt/env/bin/python is one inside; without a key it is the image's python3"
            yield Conflict((name, "container"), "is an environment outside of the container", hint)
    if job.launcher == "ssh" and job.venv and not job.venv.startswith(("/", "~/")):
        yield Conflict(("venv", "launcher"), f'found "{job.venv}", expected a path on the hosts, from / or ~/')


def _machine_conflicts(job: JobSpec) -> Iterator[Conflict]:
    """Find conflicts of the sizes, the devices and the network."""
    resources, network = job.resources, job.network
    if resources.world_size > MAX_RANKS and job.launcher != "ssh":  # of ssh, see hosts
        yield Conflict(
            ("resources.nodes", "resources.procs_per_node", "resources.gpus_per_node"),
            f"{resources.nodes} nodes x {resources.ranks_per_node} = {resources.world_size} ranks, "
            f"expected at most {MAX_RANKS}",
        )
    gpus = resources.gpus_per_node
    if gpus and job.device != "cpu" and resources.ranks_per_node > gpus:
        yield Conflict(
            ("resources.procs_per_node", "resources.gpus_per_node"),
            f"{resources.ranks_per_node} ranks on each node share {gpus} GPUs, expected one rank per GPU",
            "leave procs_per_node out: it follows gpus_per_node",
        )
    if network.init == "file" and job.launcher == "ssh" and resources.nodes > 1:
        yield Conflict(
            ("network.init", "launcher"),
            "file needs a directory that all ranks share, and hosts over SSH share none",
            "init: tcp, or env",
        )
    silence, heartbeat = network.host_silence, network.heartbeat_timeout
    silence_s = silence.seconds if silence else HOST_SILENCE_S
    if heartbeat and heartbeat.seconds < silence_s:
        yield Conflict(
            ("network.heartbeat_timeout", "network.host_silence"),
            f"a heartbeat timeout of {heartbeat.seconds} s is shorter than host_silence, {silence_s:g} s; "
            "expected at least as much",
            "a host that does not answer sends no heartbeats: lower network.host_silence, too",
        )
    if job.device == "cuda" and resources.gpus_per_node == 0:
        yield Conflict(("resources.gpus_per_node", "device"), "device cuda needs GPUs, found 0 on each node")
    if network.backend == "nccl" and job.cpu_reason:
        yield Conflict(
            ("network.backend", "device", "resources.gpus_per_node"),
            f"nccl needs GPUs, and {job.cpu_reason}",
            "gloo works on the CPU; auto chooses it there",
        )


def _slurm_conflicts(job: JobSpec) -> Iterator[Conflict]:
    options = job.slurm
    own = job.entry is not None and job.entry.batch_script is not None
    for name, value in options.items():
        problem = option_problem(name, value, of_script=own)
        if problem:
            yield Conflict((f"slurm.{name}",), problem[0], problem[1])
    for group in ({"exclusive", "oversubscribe"}, MEMORY_OPTIONS, REQUEUE_OPTIONS):
        first, *others = [name for name in options if name in group and options[name]] or [""]
        for name in others:
            yield Conflict((f"slurm.{name}",), f"contradicts {first}, expected one of them")
    memory = [name for name in options if name in MEMORY_OPTIONS and options[name]]
    if memory and job.resources.memory_gb is not None:
        yield Conflict(
            (f"slurm.{memory[0]}", "resources.memory_gb"),
            "resources.memory_gb asks for memory too, expected one of them",
        )
    if options.get("cpus_per_gpu") and job.resources.cpus_per_task is not None:
        yield Conflict(
            ("slurm.cpus_per_gpu", "resources.cpus_per_task"), "sbatch takes one of them: both set the cores"
        )
    gpus = [name for name in options if name in GPU_OPTIONS and options[name]]
    if gpus and job.cpu_reason and asks_for_gpus(options):
        yield Conflict(
            (f"slurm.{gpus[0]}", "device"),
            f"asks for GPUs, and {job.cpu_reason}",
            f"slurm.{gpus[0]}=false leaves it out",
        )
    request = read_gpu_request(options)
    if request and job.launcher == "slurm" and not own and not job.cpu_reason:
        yield from _gpu_conflicts(request, job)
    if options.get("dependency") and job.after:
        yield Conflict(("slurm.dependency", "after"), "after sets it, expected one of them")


def _gpu_conflicts(request: GpuRequest, job: JobSpec) -> Iterator[Conflict]:
    """Find options of sbatch for GPUs that contradict the resources, or from which the ranks do not follow."""
    key, asked, wanted = f"slurm.{request.option}", _gpus_on_node(request, job), job.resources.gpus_per_node
    if asked is None and (wanted is None or request.option == "gpus"):
        yield Conflict(
            (key,),
            f"found {describe(job.slurm[request.option])}, which does not say how many GPUs, and so ranks, a node has",
            "resources.gpus_per_node in its place starts a rank for each GPU; slurm.gres=gpu:a100:4 names a type, too",
        )
    elif asked is not None and wanted is not None and asked != wanted:
        yield Conflict(
            (key, "resources.gpus_per_node"),
            f"asks for {format_count(asked, 'GPU')} on each node, and resources.gpus_per_node for {wanted}",
            f"leave one of them out: ~resources.gpus_per_node, or slurm.{request.option}=false",
        )


def _train_conflicts(train: TrainSpec, job: JobSpec) -> Iterator[Conflict]:
    yield from _image_conflicts(train)
    if train.optimizer == "adam" and train.lr_scaling == "linear":
        yield Conflict(
            ("train.lr_scaling", "train.optimizer"),
            "adam's steps do not grow with the batch, so its learning rate must not either",
            "leave lr_scaling out; to follow a published recipe, write the scaled rate into train.lr",
        )
    if train.optimizer != "adam" and train.nesterov and train.momentum == 0:
        yield Conflict(
            ("train.momentum", "train.nesterov"),
            "nesterov needs a momentum above 0",
            "train.nesterov: false is plain SGD",
        )
    if train.sync_bn and train.model == "fastnet":
        yield Conflict(
            ("train.sync_bn", "train.model"),
            "fastnet has a batch norm of its own form, which torch's SyncBatchNorm would replace",
            "resnet18 can do it",
        )
    if train.strategy == "dp" and train.compile == "always":
        yield Conflict(
            ("train.compile", "train.strategy"),
            "DataParallel's copies of the model, new in each step, cannot be compiled",
            "strategy none or ddp on one GPU compiles",
        )
    if train.strategy != "ddp" and job.resources.world_size > 1:
        hint = (
            "resources.procs_per_node: 1, and gpus_per_node as many as it shall drive"
            if train.strategy == "dp"
            else None
        )
        yield Conflict(
            ("train.strategy", "resources.procs_per_node", "resources.nodes"),
            f"{train.strategy} is one process, and the run has {job.resources.world_size} ranks",
            hint,
        )
    if train.strategy != "ddp" and train.comm != "exact":
        yield Conflict(("train.comm", "train.strategy"), f"{train.comm} is between ranks, and {train.strategy} is one")
    if train.sync_bn and job.cpu_reason:
        yield Conflict(
            ("train.sync_bn", "device", "resources.gpus_per_node"),
            f"torch's SyncBatchNorm works on GPUs only, and {job.cpu_reason}",
            "leave it out: before each evaluation the ranks' batch norm statistics are averaged anyway",
        )


def _image_conflicts(train: TrainSpec) -> Iterator[Conflict]:
    if train.dataset == FOLDER and train.data_dir is None:
        yield Conflict(
            ("train.data_dir", "train.dataset"),
            "dataset folder reads data_dir/train and data_dir/test, and no data_dir is set",
        )
    if train.dataset in IMAGE_SETS and IMAGE_SETS[train.dataset].side is None and train.image_size is None:
        yield Conflict(
            ("train.image_size", "train.dataset"),
            f"{train.dataset} has images of many sizes, and no image_size is set",
            "image_size: 224 brings all of them to 224x224",
        )
    own = BUILT_IN.get(train.dataset)
    if own is not None and train.image_size is not None and train.image_size < own:
        yield Conflict(
            ("train.image_size", "train.dataset"),
            f"found {train.image_size}, expected at least {own}, the size of {train.dataset}'s images",
        )
    side = train.image_size or own_side(train.dataset)
    if train.model == "fastnet" and side is not None and not fits_fastnet(side):
        yield Conflict(
            ("train.model", "train.image_size", "train.dataset"),
            f"fastnet is for images of 32x32 pixels (25 to 48 will do), and these have {side}x{side}",
            "resnet18 takes any size",
        )
    kept = kept_side(train.dataset, train.image_size)
    for name, pixels in (("translate", train.translate), ("cutout", train.cutout)):
        if kept is not None and pixels >= kept:
            yield Conflict(
                (f"train.{name}",), f"found {pixels}, expected less than {kept}: the images are kept at {kept}x{kept}"
            )
    if train.dataset in ("shapes", "random") and train.samples is not None and train.samples < 5:
        yield Conflict(
            ("train.samples", "train.dataset"),
            f"found {train.samples}, expected at least 5 generated images (a fifth of them are for the test)",
        )
