"""An Accelerate config file as a spec: its sizes and its precision; the hosts it does not name.

Source: accelerate/commands/config/config_args.py and commands/launch.py of accelerate 1.x.
"""

from __future__ import annotations

from typing import Any

from clusterddp.importing.findings import Findings
from clusterddp.importing.sections import Section

MARKS = frozenset({"compute_environment", "distributed_type"})
_PLAIN = frozenset({"NO", "MULTI_GPU", "MULTI_CPU"})
_RENDEZVOUS = ("machine_rank", "rdzv_backend", "rdzv_conf", "same_network", "main_process_port", "monitor_interval")
_SWITCHES = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
}
_USUAL: dict[str, object] = {
    "compute_environment": "LOCAL_MACHINE",
    "gpu_ids": "all",
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "main_training_function": "main",
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "tpu_env": [],
}
"""What `accelerate config` writes where nothing was chosen."""
_MOST_NAMED = 64
"""So many machines are written one by one, to be replaced by their names; more as a set."""


def read_accelerate_config(data: dict[str, Any], findings: Findings) -> None:
    """Read a config file of `accelerate config` into `findings`."""
    config = Section(data, findings)
    nodes = config.take_count("num_machines") or 1
    _set_sizes(config, nodes, findings)
    _set_hosts(config, nodes, findings)
    _set_variables(config, findings)
    for key in _RENDEZVOUS:
        if (value := config.take(key)) is not None:
            config.lose(key, value, "the ranks find each other by clusterddp's own rendezvous", fate="ours")
    for key, usual in _USUAL.items():
        value = config.take(key, usual)
        if value not in (usual, None):
            config.lose(key, value, "no key of a spec says it")
    config.lose_rest("no key of a spec says it")
    findings.set("entry.script", "train.py")
    findings.lose("entry.script", "the file names no script: write yours in place of train.py")


def _set_sizes(config: Section, nodes: int, findings: Findings) -> None:
    total = config.take_count("num_processes") or nodes
    kind = str(config.take("distributed_type") or "NO").upper()
    on_cpu = bool(config.take("use_cpu")) or kind == "MULTI_CPU"
    findings.set("resources.nodes", nodes)
    per_node = max(1, total // nodes)
    findings.set("resources.procs_per_node" if on_cpu else "resources.gpus_per_node", per_node)
    if total % nodes:
        config.lose("num_processes", total, f"does not go into {nodes} machines: {per_node} on each")
    if on_cpu:
        findings.set("device", "cpu")
        findings.set("env.ACCELERATE_USE_CPU", "true")
    if kind not in _PLAIN:
        config.lose("distributed_type", kind, "a spec starts DDP ranks; the script has to set this up by itself")


def _set_hosts(config: Section, nodes: int, findings: Findings) -> None:
    master = config.take("main_process_ip")
    if nodes > 1:
        findings.set("launcher", "ssh")
        others = [f"host{number}" for number in range(1, nodes)] if nodes <= _MOST_NAMED else [f"host[1-{nodes - 1}]"]
        findings.set("ssh.hosts", [str(master or "host0"), *others])
        named = "one" if master else "none"
        config.lose("main_process_ip", master, f"the file names {named} of {nodes} machines: write them into ssh.hosts")
    elif master:
        config.lose("main_process_ip", master, "clusterddp finds the address", fate="ours")


def _set_variables(config: Section, findings: Findings) -> None:
    for key, variable in _SWITCHES.items():
        value = config.take(key)
        if value not in (None, False, "no", 1):  # YAML reads a bare `no` as false
            findings.set(f"env.{variable}", str(value))
    if config.take("debug"):
        findings.set("env.ACCELERATE_DEBUG_MODE", "true")
