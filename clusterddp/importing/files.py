"""The result of reading a file (values for the spec, and what it cannot express), and the readers of small files.

Those are hostfiles, .deepspeed_env, and the configs of Accelerate and of GluonCV. They are data: nothing is executed.
Sources: accelerate/commands/config/config_args.py and commands/launch.py of accelerate 1.x;
gluoncv/torch/engine/launch.py and config/config.py of GluonCV 0.11, whose WORLD_SIZE counts machines and whose
GPU_WORLD_SIZE, GPU_WORLD_RANK and GPU are overwritten when a training starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from clusterddp.errors import SpecError, UsageError
from clusterddp.ranks.environment import PLACE_VARIABLES
from clusterddp.spec import tree
from clusterddp.spec.fields import MAX_RANKS
from clusterddp.spec.hosts import read_hostfile
from clusterddp.spec.launch_options import Word
from clusterddp.spec.secret_values import hide_in_text, is_secret

Fate = Literal["lost", "before", "ours"]
"""lost: the spec cannot express it; before: the user does it before a submit; ours: clusterddp does it itself."""

PASSED_ON = re.compile(r"PATH|PYTHON[A-Z]*|LD_LIBRARY_PATH|CUDA_HOME|CONDA_[A-Z_]*|LIBRARY_PATH|CPATH|MODULEPATH")


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """A part of the file that is not in the spec."""

    fate: Fate
    text: str
    """As it is written, without the value of a secret."""
    why: str
    source: str
    line: int | None = None


@dataclass(slots=True)
class Findings:
    """The spec as far as it is read, and what is not imported of the file."""

    source: str
    """The name of the file in messages."""
    hint: str | None = None
    """What to do where the file is refused."""
    values: dict[str, Any] = field(default_factory=dict)
    """As in a spec: sections are mappings."""
    left: list[Left] = field(default_factory=list)

    def set(self, key: str, value: Any) -> None:
        """Set the value of a dotted key; the first part of it is the section."""
        section, dot, name = key.partition(".")
        if dot:
            self.values.setdefault(section, {})[name] = value
        else:
            self.values[section] = value

    def lose(self, text: str, why: str, line: int | None = None, *, fate: Fate = "lost") -> None:
        """List a part of the file that the spec cannot express."""
        self.left.append(Left(fate=fate, text=hide_in_text(text), why=why, source=self.source, line=line))

    def refuse(self, text: str, why: str, line: int) -> NoReturn:
        """Raise the error that import does not read a part of the file."""
        raise UsageError(f"{self.source}:{line}: {hide_in_text(text)[:80]}: {hide_in_text(why)}")


def set_variable(name: str, value: Word, findings: Findings, line: int | None, *, cores: int | None = None) -> bool:
    """Put a variable into the spec's env, or list why not; False: only a shell knows its value.

    The value of a secret is never written. `cores`: those of a rank, which OMP_NUM_THREADS is without a setting.
    """
    text = f"export {name}={value.text}"
    if is_secret(name, value.text) or hide_in_text(value.text) != value.text:
        secrets = findings.values.setdefault("secrets", [])
        if name not in secrets:
            secrets.append(name)
        why = f"a secret: its value is not stored; export {name} where you submit"
        findings.lose(f"export {name}=...", why, line, fate="before")
    elif name in PLACE_VARIABLES or name.startswith("TORCHELASTIC_"):
        findings.lose(text, "clusterddp sets it for each rank", line, fate="ours")
    elif name == "PYTHONUNBUFFERED":
        findings.lose(text, "it is always set", line, fate="ours")
    elif name == "OMP_NUM_THREADS" and value.text == str(cores):
        findings.lose(text, "resources.cpus_per_task sets it", line, fate="ours")
    elif not value.computed:
        findings.values.setdefault("env", {})[name] = value.text
    elif PASSED_ON.fullmatch(name):
        findings.lose(text, "in the shell that submits: this variable is passed on", line, fate="before")
    else:
        return False
    return True


ACCELERATE_MARKS = frozenset({"compute_environment", "distributed_type"})
GLUON_SECTION = "DDP_CONFIG"
_WORDS = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_PLAIN = frozenset({"NO", "MULTI_GPU", "MULTI_CPU"})
_SHARDING_KINDS = frozenset({"FSDP", "DEEPSPEED", "MEGATRON_LM", "TP"})
_SHARDING = ("fsdp_config", "deepspeed_config", "megatron_lm_config", "parallelism_config", "tp_config")
DEEPSPEED_MARK = "zero_optimization"
_RENDEZVOUS = ("machine_rank", "rdzv_backend", "rdzv_conf", "same_network", "main_process_port", "monitor_interval")
_SWITCHES = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
}
_USUAL: tuple[object, ...] = ("LOCAL_MACHINE", "all", "no", "main", False, None, [])
"""Values of other keys that `accelerate config` writes by default."""
_GLUON_SCRIPT = "train_ddp_pytorch.py"
_GLUON_FINDS = ("WORLD_RANK", "GPU_WORLD_RANK", "GPU")


def read_hosts(path: Path, findings: Findings) -> None:
    """Read a hostfile into `findings`.

    Raises: SpecError: with every line that is wrong.
    """
    read = read_hostfile(path)
    node = read.node
    if read.problems:
        raise SpecError(read.problems)
    assert isinstance(node, tree.ListNode)
    hosts: list[str | dict[str, str | int]] = []
    for item in node.items:
        if isinstance(item, tree.Scalar):
            hosts.append(item.text)
        elif isinstance(item, tree.Mapping):
            entries = {key: value.text for key, value in item.entries.items() if isinstance(value, tree.Scalar)}
            hosts.append({"host": entries["host"], "gpus": int(entries["gpus"])})
    findings.set("launcher", "ssh")
    findings.set("ssh.hosts", hosts)


def read_env_file(text: str, findings: Findings) -> None:
    """Read lines of `NAME=value`, as DeepSpeed reads its .deepspeed_env: the value is the rest of the line."""
    for number, line in enumerate(text.splitlines(), 1):
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if equals and name.isascii() and name.isidentifier():
            set_variable(name, Word(value), findings, number)
        else:
            findings.lose(line, "expected NAME=value", number)


def read_values(node: tree.Node) -> Any:
    """Return the values of a tree with the types of YAML 1.1, as PyYAML reads them; a fraction stays text."""
    if isinstance(node, tree.Mapping):
        return {key: read_values(value) for key, value in node.entries.items()}
    if isinstance(node, tree.ListNode):
        return [read_values(item) for item in node.items]
    if node.null or node.quoted:
        return None if node.null else node.text
    if _INT.fullmatch(node.text):
        return int(node.text)
    return _WORDS.get(node.text.lower(), node.text)


def read_accelerate_config(data: dict[str, Any], findings: Findings) -> None:
    """Read a config file of `accelerate config` into `findings`.

    Raises: UsageError: it shards the model, or a number is wrong.
    """
    config = Section(data, findings)
    refuse_sharding(data, findings.source)
    nodes = config.take_count("num_machines") or 1
    _set_accelerate_sizes(config, nodes, findings)
    _set_accelerate_hosts(config, nodes, findings)
    _set_accelerate_variables(config, findings)
    for key in _RENDEZVOUS:
        if (value := config.take(key)) is not None:
            config.lose(key, value, "the ranks find each other by clusterddp's own rendezvous", fate="ours")
    config.lose_rest(usual=_USUAL)
    findings.set("entry.script", "train.py")
    findings.lose("entry.script", "the file names no script: write yours in place of train.py")


def refuse_sharding(data: Mapping[str, Any], source: str) -> None:
    """Refuse a config of FSDP, DeepSpeed, ...: a spec has only sizes, and its ranks would train by plain DDP.

    Raises: UsageError: it is one.
    """
    kind = str(data.get("distributed_type")).upper()
    if DEEPSPEED_MARK in data:
        found, hint = f"it has {DEEPSPEED_MARK}", f"entry: {{script: train.py, args: [--deepspeed_config, {source}]}}"
    elif kind in _SHARDING_KINDS or any(map(data.get, _SHARDING)):
        found = f"distributed_type is {kind}"
        if kind not in _SHARDING_KINDS:
            found = f"it has {next(filter(data.get, _SHARDING))}"
        hint = (
            f"entry: {{command: [accelerate, launch, --config_file, {source}, --num_machines, '{{num_nodes}}', "
            "--machine_rank, '{node_rank}', --main_process_ip, '{master_addr}', --main_process_port, '{master_port}', "
            "train.py], owns_ranks: true}"
        )
    else:
        return
    why = "the model is sharded, a spec has no key for that, and its ranks would train by plain DDP"
    raise UsageError(f"{source}: {found}: {why}", hint=f"the script or its launcher reads the file: {hint}")


def _set_accelerate_sizes(config: Section, nodes: int, findings: Findings) -> None:
    total = config.take_count("num_processes") or nodes
    kind = str(config.take("distributed_type") or "NO").upper()
    on_cpu = bool(config.take("use_cpu")) or kind == "MULTI_CPU"
    findings.set("resources.nodes", nodes)
    per_node = max(1, total // nodes)
    findings.set("resources.procs_per_node" if on_cpu else "resources.gpus_per_node", per_node)
    if total % nodes:
        config.lose("num_processes", total, f"does not divide by {nodes} machines: {per_node} on each")
    if on_cpu:
        findings.set("device", "cpu")
        findings.set("env.ACCELERATE_USE_CPU", "true")
    if kind not in _PLAIN:
        config.lose("distributed_type", kind, "a spec starts DDP ranks; the script has to set this up itself")


def _set_accelerate_hosts(config: Section, nodes: int, findings: Findings) -> None:
    master = config.take("main_process_ip")
    if nodes > 1:
        findings.set("launcher", "ssh")
        findings.set("ssh.hosts", [str(master or "host0"), f"host[1-{nodes - 1}]"])
        named = "one" if master else "none"
        config.lose("main_process_ip", master, f"the file names {named} of {nodes} machines: write them into ssh.hosts")
    elif master:
        config.lose("main_process_ip", master, "clusterddp finds the address", fate="ours")


def _set_accelerate_variables(config: Section, findings: Findings) -> None:
    for key, variable in _SWITCHES.items():
        value = config.take(key)
        if value not in (None, False, "no", 1):  # YAML reads a bare `no` as false
            findings.set(f"env.{variable}", str(value))
    if config.take("debug"):
        findings.set("env.ACCELERATE_DEBUG_MODE", "true")


def read_gluon_config(data: dict[str, Any], findings: Findings) -> None:
    """Read a configuration of GluonCV into `findings`.

    Raises: UsageError: machines and their number contradict each other, or the addresses do.
    """
    config = Section(data.get(GLUON_SECTION) or {}, findings, GLUON_SECTION)
    hosts = [str(host) for host in config.take_list("WOLRD_URLS") or config.take_list("WORLD_URLS")]
    count = config.take_count("WORLD_SIZE") or len(hosts) or 1
    master, port = _address(str(config.take("DIST_URL") or ""))
    if not hosts and count == 1:
        hosts = [master or "127.0.0.1"]
    if len(hosts) != count:
        raise UsageError(
            f"{findings.source}: WORLD_SIZE is {count}, and WOLRD_URLS names {len(hosts)} machines: {', '.join(hosts)}",
            hint="both count machines: one address each",
        )
    if master and master != hosts[0]:
        raise UsageError(
            f"{findings.source}: DIST_URL is at {master}, and the first of WOLRD_URLS is {hosts[0]}",
            hint="rank 0 is on the first machine of WOLRD_URLS, and DIST_URL is its address",
        )
    findings.set("launcher", "ssh")
    findings.set("ssh.hosts", hosts)
    findings.set("resources.nodes", count)
    _set_gluon_gpus(config, count, findings)
    if port:
        findings.set("network.master_port", port)
    backend = str(config.take("DIST_BACKEND") or "nccl").lower()
    findings.set("network.backend", backend)
    if not config.take("AUTO_RANK_MATCH", default=True):
        config.lose("AUTO_RANK_MATCH", False, "ranks follow the order of the hosts: node 0 is the first", fate="ours")
    if config.take("DISTRIBUTED", default=True) is False:
        config.lose("DISTRIBUTED", False, "a run of clusterddp is distributed; one rank: resources.procs_per_node: 1")
    for name in _GLUON_FINDS:
        if (value := config.take(name)) is not None:
            config.lose(name, value, "found when the ranks start", fate="ours")
    config.lose_rest()
    _set_gluon_entry(data, findings)


def _set_gluon_entry(data: dict[str, Any], findings: Findings) -> None:
    """Keep GluonCV's own program, which reads the rest of the file and starts a rank for each GPU itself."""
    findings.set("entry.script", _GLUON_SCRIPT)
    findings.set("entry.args", ["--config-file", findings.source])
    findings.set("entry.owns_ranks", True)
    why = f"the file names no script: {_GLUON_SCRIPT} is the one of GluonCV's examples; entry.script names another"
    findings.lose("entry.script", why)
    for name in data:
        if name != GLUON_SECTION:
            findings.lose(f"{name}: ...", "the script reads it from the same file", fate="ours")


def _set_gluon_gpus(config: Section, machines: int, findings: Findings) -> None:
    total = config.take_count("GPU_WORLD_SIZE")
    if total is None:
        return
    each, rest = divmod(total, machines)
    if rest or not each:
        config.lose("GPU_WORLD_SIZE", total, f"does not divide by {machines} machines; set gpus of each host")
        return
    findings.set("resources.gpus_per_node", each)


def _address(url: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(?:tcp://)?\[?([^\]/]*?)\]?(?::([0-9]{1,5}))?/?", url)
    return (match[1], int(match[2]) if match[2] else None) if match else ("", None)


class Section:
    """Keys and values that are read one by one; `lose_rest` lists those that are left."""

    def __init__(self, values: object, findings: Findings, name: str = "") -> None:
        if not isinstance(values, Mapping):
            raise UsageError(f"{findings.source}: {name or 'it'} is not a mapping of keys and values")
        self._values = dict(values)
        self._findings = findings
        self._prefix = f"{name}." if name else ""

    def take(self, key: str, default: Any = None) -> Any:
        """Take the value of a key."""
        return self._values.pop(key, default)

    def take_count(self, key: str) -> int | None:
        """Take a number from 1; None where there is none.

        Raises: UsageError: it is something else, or more than a run may have ranks.
        """
        value = self._values.pop(key, None)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_RANKS):
            return value
        expected = f"at most {MAX_RANKS:,}" if isinstance(value, int) and value > MAX_RANKS else "a number from 1"
        raise UsageError(f"{self._findings.source}: {self._prefix}{key} is {value!r}, expected {expected}")

    def take_list(self, key: str) -> list[Any]:
        """Take a list; empty where there is none. Raises: UsageError: it is something else."""
        value = self._values.pop(key, None)
        if value is None or isinstance(value, list):
            return value or []
        raise UsageError(f"{self._findings.source}: {self._prefix}{key} is {value!r}, expected a list")

    def lose(self, key: str, value: object, why: str, *, fate: Fate = "lost") -> None:
        """List a value that is not imported, and why."""
        shown = "..." if is_secret(key, str(value)) else value
        self._findings.lose(f"{self._prefix}{key}: {shown}", why, fate=fate)

    def lose_rest(self, *, usual: Sequence[object] = ()) -> None:
        """List what is left, without the values that are `usual`."""
        for key, value in self._values.items():
            if value not in usual:
                self.lose(str(key), value, "a spec has no key for it")
        self._values.clear()
