"""doctor --deep: what the ranks of a spec measure, what it means, and the report that is sent."""

from __future__ import annotations

import dataclasses
import html
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterddp.facts.checks import to_json
from clusterddp.facts.deep_check import (
    MARK,
    Compile,
    Compute,
    Environment,
    Finding,
    Link,
    Reduction,
    Reductions,
    Training,
    judge_ranks,
    judge_transports,
    read_findings,
)
from clusterddp.system.devices import visible_gpus
from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_check
import trainer_table

GPU = Environment(
    python="3.11.7", torch="2.13.0", cuda="13.0", cudnn=91000, nccl="2.28.9", cores=16, locked_memory_bytes=-1,
    shm_bytes=1 << 34, compile_obstacle=None, variables={}, gpus=8, gpu="NVIDIA H100", capability="9.0",
    memory_bytes=1 << 36, driver="580.10",
)  # fmt: skip
TRAINING = Training(
    model="resnet18", precision="bf16", batch=2048, step_ms=10.0, images_per_s=204800.0, checkpoint_s=0.2,
)  # fmt: skip
SPEC = """\
name: measured
launcher: local
device: cpu
resources: {procs_per_node: 2}
train: {model: fastnet, width: 0.25, batch_size: 8, precision: fp32, compile: never}
"""


def probed(probe: str, found: Any = None, *, rank: int = 0, error: str | None = None) -> Finding:
    return Finding(rank=rank, host=f"gpu0{rank // 8}", probe=probe, found=found, error=error)


def measured(findings: list[Finding]) -> dict[str, Any]:
    """Return what `doctor --deep -o json` prints of these findings."""
    checks = judge_ranks(findings, world_size=2, state="COMPLETED", run="run-1")
    return {"checks": to_json(checks), "findings": [finding.to_json() for finding in findings]}


def levels(findings: list[Finding], **changes: Any) -> dict[str, str]:
    checks = judge_ranks(findings, **{"world_size": 1, "state": "COMPLETED", "run": "run-1"} | changes)
    return {check.name: check.level for check in checks}


@pytest.mark.parametrize(
    ("finding", "level"),
    [
        (probed("environment", GPU), "ok"),
        (probed("environment", dataclasses.replace(GPU, locked_memory_bytes=65536)), "note"),
        (probed("environment", dataclasses.replace(GPU, compile_obstacle="no Python.h in /usr/include")), "note"),
        (probed("compile", Compile(seconds=3.0)), "ok"),
        (probed("compile", error="InvalidCxxCompiler: No working C++ compiler found"), "note"),
        (probed("all_reduce", Reductions(sizes=(Reduction(bytes=1024, ms=0.1, bus_gb_per_s=0.1),))), "ok"),
        (probed("all_reduce", error="DistBackendError: NCCL error"), "red"),
        (probed("train", TRAINING), "ok"),
        (probed("train", error="OutOfMemoryError: CUDA out of memory"), "red"),
    ],
)
def test_each_probe_is_judged(finding: Finding, level: str) -> None:
    assert levels([finding]) == {finding.probe.replace("_", "-"): level}


def test_a_slow_rank_is_named_by_its_time() -> None:
    slow = dataclasses.replace(TRAINING, step_ms=15.0)
    findings = [probed("train", slow if rank == 3 else TRAINING, rank=rank) for rank in range(8)]
    assert levels(findings, world_size=8) == {"train": "note"}


def test_a_host_that_computes_one_and_a_half_times_as_long_as_the_median_is_named() -> None:
    findings = [probed("compute", Compute(ms=1.7 if rank == 9 else 1.0), rank=rank) for rank in range(24)]
    (check,) = judge_ranks(findings, world_size=24, state="COMPLETED", run="run-1")
    assert {host: result.level for host, result in check.results.items()} == {
        "gpu00": "ok",
        "gpu01": "note",
        "gpu02": "ok",
    }


@pytest.mark.parametrize(
    ("speeds", "noted"),
    [
        ({"ab": 1000.0, "bc": 1000.0, "cd": 1000.0, "da": 1000.0}, set()),
        ({"ab": 10.0, "bc": 10.0, "cd": 1000.0, "da": 1000.0}, {"b"}),
        ({"ab": 10.0, "bc": 1000.0, "cd": 1000.0, "da": 1000.0}, {"a", "b"}),
        ({"ab": 10.0, "bc": 1000.0, "ca": 10.0}, {"a"}),
        ({"ab": 10.0}, {"a"}),
    ],
)
def test_a_slow_host_is_told_from_a_slow_link(speeds: dict[str, float], noted: set[str]) -> None:
    """A host is at fault when all of its links are slow; of a slow link both ends are named, or the one that sent."""
    findings = []
    for rank, (ends, speed) in enumerate(speeds.items()):
        link = Link(hosts=(ends[0], ends[1]), mbyte_per_s=speed, latency_ms=0.1, rated_mbyte_per_s=1250.0)
        findings.append(Finding(rank=rank, host=ends[0], probe="links", found=link))
    (check,) = judge_ranks(findings, world_size=4, state="COMPLETED", run="run-1")
    assert {host for host, result in check.results.items() if result.level == "note"} == noted


def test_ranks_that_end_early_are_red_with_the_last_probe() -> None:
    (_, ranks) = judge_ranks([probed("environment", GPU)], world_size=2, state="FAILED", run="run-1")
    (result,) = ranks.results.values()
    assert ranks.level == "red"
    assert "FAILED; last reported: environment; 1 of 2 reported nothing" in result.found


def test_the_transport_of_nccl_is_judged_with_the_warning_of_status() -> None:
    node = {"node_rank": 0, "host": "gpu00", "network": "Socket", "devices": ("eth0",), "links": ("P2P/CUMEM",)}
    check = judge_transports([node], "between hosts NCCL sends over sockets")
    assert check.level == "note"
    assert check.results["gpu00"].found == "Socket, eth0, P2P/CUMEM; between hosts NCCL sends over sockets"
    assert judge_transports([node], "").level == "ok"


def test_what_a_rank_prints_is_read_back_and_what_makes_no_sense_is_left_out() -> None:
    lines = [finding.to_line() for finding in (probed("environment", GPU), probed("train", TRAINING))]
    hostile = [MARK + "[" * 9000, MARK + "{}", MARK + lines[0][len(MARK) :].replace('"cores": 16', '"cores": "x"')]
    assert list(read_findings("\n".join(["a word", *hostile, *lines]))) == [
        probed("environment", GPU),
        probed("train", TRAINING),
    ]


def test_a_report_that_is_sent_names_no_host_and_its_page_escapes_what_others_wrote() -> None:
    findings = [
        probed("environment", dataclasses.replace(GPU, topology="GPU0 <script>alert(1)</script>\n")),
        probed("train", TRAINING, rank=8),
    ]
    report = gpu_check.without_host_names(measured(findings))
    text = json.dumps(report)
    assert "gpu0" not in text
    assert [each["host"] for each in report["findings"] + report["checks"]] == [0, 1, 0, 1]
    page = gpu_check.render_page(json.loads(text), title="<b>")
    assert "<script>" not in page
    assert "<b>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


@pytest.mark.slow
def test_the_ranks_of_a_spec_measure(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(SPEC)
    command = [sys.executable, "-m", "clusterddp", "doctor", "job.yaml", "--deep", "-o", "json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["healthy"], report["state"]) == (True, "COMPLETED")
    assert {(each["probe"], each["rank"]) for each in report["findings"] if each["found"]} == {
        (probe, rank) for probe in ("environment", "rendezvous", "compute", "all_reduce", "train") for rank in (0, 1)
    }
    assert {each["level"] for each in report["checks"]} == {"ok"}


def test_deep_without_a_spec_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "clusterddp", "doctor", "--deep"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "give a SPEC" in done.stderr


@pytest.mark.skipif(bool(visible_gpus(os.environ)), reason="there are GPUs here")
def test_gpu_check_and_its_page_name_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--out", str(tmp_path / "sent")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3
    assert "red   NVIDIA GPU" in done.stdout
    report = json.loads((tmp_path / "sent.json").read_text())
    missing = [each for each in report["checks"] if each["check"] == "NVIDIA GPU"]
    assert missing[0]["fix"] in html.unescape((tmp_path / "sent.html").read_text())


def test_a_report_becomes_a_table_of_the_docs() -> None:
    findings = [probed("environment", GPU), probed("train", TRAINING)]
    deep = {"ranks": 8} | measured(findings)
    speed = [{"what": "jobs/a.yaml", "images_per_s": 1000.0, "step_ms": 2.0}]
    machine = {"torch": "2.13.0", "date": "2026-11-25", "commit": "abcdef0"}
    report = {"deep": deep, "machine": machine, "tests": {"passed": 3, "failed": []}, "speed": speed}
    lines = list(trainer_table.gpu_check_rows(json.loads(json.dumps(report))))
    assert lines[0].startswith("8 x NVIDIA H100, driver 580.10, torch 2.13.0, NCCL 2.28.9;")
    assert "| jobs/a.yaml | 1000.0 | 2.0 |  |" in lines
