"""The preflight: what each node can do just before its ranks start, and which nodes are sick, compared with the others.

Children of each supervisor measure its node, for a moment and with all cores at once; the head compares and decides. A
start is later by that moment, a fifth of a second, unless it waits for something else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from clusterddp.facts.memory import free_bytes, read_memory_limit
from clusterddp.network.rendezvous.connection import Message
from clusterddp.node.log import log_line
from clusterddp.run.gang import Gang
from clusterddp.run.supervisors import SupervisorOrder
from clusterddp.system.processes import die_with_parent
from clusterddp.wire import build, read_object

_FIRST_S, _AGAIN_S = 0.15, 0.3
"""How long cores are measured; again, where a node seems slow."""
_ROUNDS = 3
"""A node is slow if it is so in each of them."""
_LIMIT_S = 3.0
"""After so long a start goes on without what is missing."""
_SLOW_CORE, _SLOW_LINK, _LITTLE_FREE = 0.6, 0.5, 0.5
"""Parts of the median of the other nodes; a process that is left over on a core takes half of it."""
_FAST_LINK = 60.0
"""MB/s: above half a gigabit the figures of so short a probe say more about the processors."""
_BLOCK_MB = 4
_DISK_BYTES = 1 << 20
_SICK_DISK = frozenset({errno.EROFS, errno.EIO, errno.ESTALE, errno.ENODEV})
_FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT})
_GPU_TIMEOUT_S = 2.5
_GPU_FIELDS = "index,ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.hw_slowdown"
_LOST_GPU = re.compile(r"GPU is lost|fallen off the bus|Unable to determine the device handle|No devices were found")
_XID = re.compile(r",(\d+),[^;]*;NVRM: Xid \((?:PCI:)?([^)]*)\): (\d+)")
_BAD_XIDS = {48: "memory error", 64: "row remapping failed", 74: "NVLink error", 79: "fallen off the bus"}
_BAD_XIDS |= {95: "uncontained memory error", 119: "its GSP does not answer", 120: "its GSP failed"}
"""Source: docs.nvidia.com, XID errors: those of the hardware, not of the program."""
_XID_AGE_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeHealth:
    """What the preflight of one node has found."""

    core: int | None = None
    """The slowest core that its ranks need; None: no core was measured."""
    mbyte_per_s: float = 0.0
    """What this core hashes, by the clock on the wall."""
    share: float = 1.0
    """0..1: the part of the time that it had for that; another process had the rest, or a limit withheld it."""
    free: float | None = None
    """0..1: the part of the memory that can be allocated."""
    failed: tuple[str, ...] = ()
    """In words, what makes a start useless."""
    slow: tuple[str, ...] = ()
    """In words, what a user should look at."""


def measure_node(folders: Mapping[str, Path], *, cores: int, seconds: float) -> NodeHealth:
    """Measure this machine; `folders`: where files are written; `cores`: how many the ranks need."""
    speed, share, core = _measure_cores(cores, seconds)
    free, total = free_bytes(), read_memory_limit() or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    failed, slow = list[str](), list[str]()
    for what, folder in folders.items():
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(_DISK_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            found = failed if error.errno in _SICK_DISK else slow if error.errno in _FULL_DISK else []
            found.append(f"{what} {folder} cannot be written: {error.strerror}")
    return NodeHealth(
        core=core,
        mbyte_per_s=round(speed, 1),
        share=round(share, 2),
        free=None if free is None else round(min(1.0, free / total), 2),
        failed=tuple(failed),
        slow=tuple(slow),
    )


def _measure_cores(needed: int, seconds: float) -> tuple[float, float, int]:
    """Compute on all cores at once: return MB/s, share and number of the slowest of the `needed` fastest ones.

    The task of a batch job is often bound to the cores of one rank: those of the whole job are taken where the kernel
    gives no others. Of a machine that others use as well, cores that the run does not need may be busy.
    """
    own = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        own = own if len(os.sched_getaffinity(0)) > max(needed, len(own)) else os.sched_getaffinity(0)
    block, together = bytes(_BLOCK_MB << 20), threading.Barrier(len(own))
    found: list[tuple[float, float, int]] = []

    def compute(core: int) -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {core})  # of this thread
        together.wait()
        begun, cpu_s, blocks = time.monotonic(), time.thread_time(), 0
        while (passed_s := time.monotonic() - begun) < seconds:
            hashlib.blake2b(block)  # without the GIL
            blocks += 1
        found.append((blocks * _BLOCK_MB / passed_s, (time.thread_time() - cpu_s) / passed_s, core))

    threads = [threading.Thread(target=compute, args=[core]) for core in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(found, reverse=True)[: max(1, needed)][-1]


def measure_gpus() -> NodeHealth:
    """Ask nvidia-smi, and the kernel's log where it may be read, whether a GPU is sick."""
    text = ""
    if (command := shutil.which("nvidia-smi")) is not None:
        argv = [command, f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(argv, capture_output=True, timeout=_GPU_TIMEOUT_S, check=False)
            text = (done.stdout + done.stderr).decode(errors="replace")
    return judge_gpus(text, _read_kernel_log(), up_s=time.monotonic())


def judge_gpus(text: str, kernel_log: str, *, up_s: float) -> NodeHealth:
    """Judge the answer of nvidia-smi and the rows of /dev/kmsg; `up_s`: seconds since the boot."""
    failed = [line.strip() for line in text.splitlines() if _LOST_GPU.search(line)][:1]
    slow = []
    for line in text.splitlines():
        index, errors, slowed, *_ = (*(word.strip() for word in line.split(",")), "", "")
        if index.isdecimal() and errors.isdecimal() and int(errors):
            slow.append(f"GPU {index} has {errors} uncorrectable memory errors")
        if index.isdecimal() and slowed == "Active":
            slow.append(f"GPU {index} is slowed down by its hardware: heat or power")
    slow += [
        f"Xid {number} of GPU {gpu}: {_BAD_XIDS[int(number)]}"
        for microseconds, gpu, number in _XID.findall(kernel_log)
        if int(number) in _BAD_XIDS and up_s - int(microseconds) / 1e6 < _XID_AGE_S
    ]
    return NodeHealth(failed=tuple(failed), slow=tuple(dict.fromkeys(slow)))


def _read_kernel_log() -> str:
    rows = []
    with contextlib.suppress(OSError):
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while True:  # a row at a time, until there is none
                with contextlib.suppress(BrokenPipeError):  # it was overwritten
                    rows.append(os.read(log, 8192).decode(errors="replace"))
        finally:
            os.close(log)
    return "".join(rows)


def compare(nodes: Mapping[int, NodeHealth]) -> dict[int, str]:
    """Return what is slow about nodes, compared with the median of the others; of one without others nothing."""
    found: dict[int, str] = {}
    for number, node in nodes.items():
        others = [other for each, other in nodes.items() if each != number and other.core is not None]
        if node.core is None or not others:
            continue
        speed, share = (statistics.median(getattr(o, name) for o in others) for name in ("mbyte_per_s", "share"))
        free = statistics.median([other.free for other in others if other.free is not None] or [0.0])
        if node.mbyte_per_s < _SLOW_CORE * speed:
            part = f"core {node.core} computes at {node.mbyte_per_s / speed:.0%} of the other nodes' speed"
            busy = f"it has {node.share:.0%} of its time, another process or a limit the rest"
            found[number] = f"{part}: {busy if node.share < _SLOW_CORE * share else 'heat, or a lower clock'}"
        elif node.free is not None and node.free < _LITTLE_FREE * free:
            found[number] = f"{node.free:.0%} of its memory is free, on the other nodes {free:.0%}"
    return found


def compare_links(mbyte_per_s: Mapping[int, float]) -> dict[int, str]:
    """Return what is slow about links to node 0, by the node at the other end."""
    found = {}
    for number, speed in mbyte_per_s.items():
        others = [other for each, other in mbyte_per_s.items() if each != number]
        usual = statistics.median(others) if others else 0.0
        if speed < min(_FAST_LINK, _SLOW_LINK * usual):
            found[number] = f"its link to node 0 carries {speed:.3g} MB/s, the others {usual:.3g}"
    return found


def is_checked(order: SupervisorOrder) -> bool:
    """Return whether a node is measured: on other machines than the one of the submit, before the run's own ranks."""
    return order.step is None and order.is_elsewhere


class NodeCheck:
    """The children of a supervisor that measure its node; forked, for a Python of their own would take longer."""

    def __init__(self, order: SupervisorOrder, report: Callable[[Message], None]) -> None:
        gang, node = order.gang, order.node
        self._report = report
        temporary = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108  as tempfile of the ranks, which goes on silently
        self._folders = {"the run's directory": order.run.launcher_dir, "TMPDIR": Path(temporary)}
        self._cores = len(gang.carried_by(node.ranks)) * (gang.threads_per_rank or 1)
        self._children: dict[int, tuple[int, bool]] = {}
        """By pid: memory (a memfd) that gets what the child has found, and whether the start waits for it."""
        if is_checked(order):
            self.measure(_FIRST_S)
            if not gang.on_cpu:
                self._fork(measure_gpus, awaited=False)

    def measure(self, seconds: float) -> None:
        """Begin to measure the node."""
        self._fork(lambda: measure_node(self._folders, cores=self._cores, seconds=seconds), awaited=True)

    def on_exits(self, exits: Mapping[int, int]) -> None:
        """Report what a child has found."""
        for pid in self._children.keys() & exits.keys():
            memory, awaited = self._children.pop(pid)
            found = os.pread(memory, 1 << 16, 0) or b"{}"  # empty: it failed, as the log says, or was killed
            self._report({"kind": "preflight", "awaited": awaited, **read_object(found)})
            os.close(memory)

    def _fork(self, work: Callable[[], NodeHealth], *, awaited: bool) -> None:
        memory = os.memfd_create("clusterddp-preflight")
        pid = os.fork()
        if pid:
            self._children[pid] = memory, awaited
            return
        try:
            die_with_parent()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(_LIMIT_S) + 1)  # it ends by it
            os.write(memory, json.dumps(dataclasses.asdict(work())).encode())
        except Exception:
            log_line(f"the preflight failed: {traceback.format_exc()}")
        finally:
            os._exit(0)


class Finding(NamedTuple):
    """What is wrong with a node; `failed`: its ranks need not start."""

    node_rank: int
    why: str
    failed: bool = False


@dataclass(slots=True)
class Preflight:
    """The head's side: what the nodes have found, in up to three rounds, which all of them begin at the same moment."""

    gang: Gang
    send: Callable[[int, Message], None]
    found: dict[int, NodeHealth] = field(default_factory=dict)
    """In the newest round, by node rank."""
    _awaited: dict[int, float] = field(default_factory=dict)
    """By node rank: when the start no longer waits for it."""
    _suspects: dict[int, str] = field(default_factory=dict)
    """Nodes that were slow in every round so far."""
    _rounds: int = 0
    _links: dict[int, float] = field(default_factory=dict)
    """MB/s."""
    _tried_again: set[int] = field(default_factory=set)
    """Nodes whose link was measured once more."""
    _findings: list[Finding] = field(default_factory=list)

    def expect(self, node_rank: int, now: float) -> None:
        """Wait for a node's report, for a while."""
        self._awaited[node_rank] = now + _LIMIT_S

    def on_report(self, node_rank: int, report: Message) -> None:
        """Take in what a node has found about itself, or about its link to this one."""
        if "link" in report:
            self._on_link(node_rank, float(report["link"]))
            return
        health = build(NodeHealth, report)
        self._findings += [Finding(node_rank, why, failed=True) for why in health.failed]
        self._findings += [Finding(node_rank, why) for why in health.slow]
        if report["awaited"]:
            self.found[node_rank] = health
            self._awaited.pop(node_rank, None)

    def is_over(self, now: float) -> bool:
        """Return whether the ranks may start; begin another round while a node seems slow."""
        for node_rank in [each for each, until in self._awaited.items() if now >= until]:
            del self._awaited[node_rank]
            why = f"its preflight did not end within {_LIMIT_S:g} s: a core, or its storage, hangs"
            self._findings.append(Finding(node_rank, why))
        if self._awaited or self._rounds == _ROUNDS:
            return not self._awaited
        slow = compare(self.found) if len({node.host for node in self.gang.nodes}) == len(self.gang.nodes) else {}
        self._suspects = {each: why for each, why in slow.items() if not self._rounds or each in self._suspects}
        self._rounds += 1
        if not self._suspects or self._rounds == _ROUNDS:
            self._rounds = _ROUNDS
            self._findings += [Finding(node_rank, why) for node_rank, why in self._suspects.items()]
            return True
        for node_rank in sorted(self.found):
            self.expect(node_rank, now)
            self.send(node_rank, {"kind": "preflight", "seconds": _AGAIN_S})
        return False

    def take(self) -> Iterator[Finding]:
        """Return what was found since the last call; what all of several nodes have in common is no node's fault."""
        findings, self._findings = self._findings, []
        for each in findings:
            alike = {other.node_rank for other in findings if other.why == each.why}
            if each.failed or len(alike) == 1 or len(alike) < len(self.gang.nodes):
                yield each

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return what the newest round has measured, by host."""
        return {self.gang.node(each).host: dataclasses.asdict(found) for each, found in sorted(self.found.items())}

    def _on_link(self, node_rank: int, mbyte_per_s: float) -> None:
        """Compare the links once all are known; one that seems slow is measured once more, without the others."""
        self._links[node_rank] = max(mbyte_per_s, self._links.get(node_rank, 0.0))
        slow = compare_links(self._links) if len(self._links) == len(self.gang.nodes) - 1 else {}
        for each in slow.keys() - self._tried_again:
            self._tried_again.add(each)
            self.send(each, {"kind": "preflight", "link": True})
            slow.pop(each)
        if node_rank in slow:
            self._findings.append(Finding(node_rank, slow[node_rank]))
