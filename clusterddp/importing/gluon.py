"""GluonCV's DDP_CONFIG as a spec: machines by address, one process on each that starts a rank for every GPU.

Source: gluoncv/torch/engine/launch.py and config/config.py of GluonCV 0.11. WORLD_SIZE counts machines; GPU_WORLD_SIZE,
GPU_WORLD_RANK and GPU are overwritten when a training starts.
"""

from __future__ import annotations

import re
from typing import Any

from clusterddp.errors import UsageError
from clusterddp.importing.findings import Findings
from clusterddp.importing.sections import Section

SECTION = "DDP_CONFIG"
SCRIPT = "train_ddp_pytorch.py"
_ASSIGNED = ("WORLD_RANK", "GPU_WORLD_RANK", "GPU")


def read_gluon_config(data: dict[str, Any], findings: Findings) -> None:
    """Read a configuration of GluonCV's into `findings`.

    Raises: UsageError: machines and their number do not agree, or there is no address to meet at.
    """
    config = Section(data.get(SECTION) or {}, findings, SECTION)
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
    _set_gpus(config, count, findings)
    if port:
        findings.set("network.master_port", port)
    backend = str(config.take("DIST_BACKEND") or "nccl").lower()
    findings.set("network.backend", backend)
    if not config.take("AUTO_RANK_MATCH", default=True):
        config.lose("AUTO_RANK_MATCH", False, "the order of the hosts decides: node 0 is the first", fate="ours")
    if config.take("DISTRIBUTED", default=True) is False:
        config.lose("DISTRIBUTED", False, "a run of clusterddp is distributed; one rank: resources.procs_per_node: 1")
    for name in _ASSIGNED:
        if (value := config.take(name)) is not None:
            config.lose(name, value, "found when the ranks start", fate="ours")
    config.lose_rest("no key of a spec says it")
    _set_entry(data, findings)


def _set_entry(data: dict[str, Any], findings: Findings) -> None:
    """The program stays GluonCV's own: it reads the rest of the file, and starts a rank for each GPU itself."""
    findings.set("entry.script", SCRIPT)
    findings.set("entry.args", ["--config-file", findings.source])
    findings.set("entry.owns_ranks", True)
    why = f"the file names no script: {SCRIPT} is the one of GluonCV's examples; entry.script names another"
    findings.lose("entry.script", why)
    for name in data:
        if name != SECTION:
            findings.lose(f"{name}: ...", "the script reads it from the same file", fate="ours")


def _set_gpus(config: Section, machines: int, findings: Findings) -> None:
    total = config.take_count("GPU_WORLD_SIZE")
    if total is None:
        return
    each, rest = divmod(total, machines)
    if rest or not each:
        config.lose("GPU_WORLD_SIZE", total, f"does not go into {machines} machines; gpus of a host says how many")
        return
    findings.set("resources.gpus_per_node", each)


def _address(url: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(?:tcp://)?\[?([^\]/]*?)\]?(?::([0-9]{1,5}))?/?", url)
    return (match[1], int(match[2]) if match[2] else None) if match else ("", None)
