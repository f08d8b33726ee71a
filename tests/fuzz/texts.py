"""What the fuzzer mutates of text: what programs print, what launchers set, what people write."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.fuzz.mutations import Example, Target
from tests.fuzz.records import COMMANDS_A_TERMINAL
from tests.support.paths import JOBS


def printed_by_slurm() -> Iterator[Target]:
    from clusterddp.network.hostlist import expand
    from clusterddp.places.slurm import cluster, explain, first_spec, queue
    from clusterddp.places.slurm import cluster as partitions
    from clusterddp.places.slurm import commands as control
    from clusterddp.places.slurm import queue as jobs

    tag = "0" * 20
    stamps = ("2026-11-24T20:00:00", "N/A", "2026-11-25T20:00:00")
    named = ("/runs/a/launcher", f"x.{tag}", f"clusterddp a {tag}")
    squeue = jobs.SEPARATOR.join(("17", "17", "N/A", "RUNNING", *stamps, "gpu", "2", "n[1-2]", "None", *named))
    array = jobs.SEPARATOR.join(("18", "17", "3", "PENDING", *stamps, "gpu", "2", "", "Resources", *named))
    sacct = jobs.SEPARATOR.join(("17_3", "CANCELLED by 0", "0:15", *stamps, "gpu", "2", "n[1-2]", *named))
    show = f"JobId=17 JobName=x.{tag} UserId=a(1) JobState=RUNNING Reason=None Restarts=1 PreemptTime=None "
    show += f"RunTime=00:10:00 TimeLimit=1-00:00:00 StartTime={stamps[0]} EndTime={stamps[2]} SuspendTime=None"
    config = (
        "MaxArraySize = 1001\nMaxJobCount = 10000\nSchedulerParameters = bf_max,max_array_tasks=10\nKillWait = 30 sec\n"
        "ClusterName = c\nSLURM_VERSION = 23.02.1\nAccountingStorageType = accounting_storage/slurmdbd\n"
        "MinJobAge = 300 sec\n"
        "AccountingStorageEnforce = associations\nJobRequeue = 1\nPreemptMode = OFF\nProctrackType = proctrack/cgroup\n"
    )
    partition = (
        "PartitionName=gpu Default=YES MaxTime=2-00:00:00 DefaultTime=01:00:00 State=UP GraceTime=60 MaxNodes=4 "
        "AllowAccounts=a,b"
    )
    sinfo = partitions.SEPARATOR.join(("gpu", "4", "64", "256000", "mix*", "gpu:a100:4(S:0-1),mps:400"))
    association = "c|a||normal|100|2-00:00:00"
    readers: dict[str, Callable[[str], object]] = {
        "scontrol show job": lambda text: (control.read_job(text), control.read_time_left_s(text)),
        "scontrol show config": lambda text: (
            cluster.array_limits(cluster.parse_config(text)),
            control.read_kill_wait_s(text),
        ),
    }

    def read_jobs(reader: Callable[[str], list[jobs.Job]], text: str) -> None:
        for job in queue._newest(reader(text)).values():
            explain.explain_waiting(job)
            explain.explain_end(job)
            explain.explain_end(job, began=False)
            repr(job.phase)

    def read_cluster(what: str, text: str) -> None:
        groups = partitions.parse_node_groups(text if what == "sinfo" else sinfo)
        found = partitions.parse_partitions(text if what == "partitions" else partition, groups)
        known = partitions.parse_associations(text if what == "associations" else association, cluster=None)
        facts = cluster.Cluster(partitions=found, associations=known)
        chosen = first_spec.choose_partition(facts)
        if chosen is not None:
            first_spec.fill_in(facts, chosen)
        list(first_spec.consequences(facts, chosen))

    def read(what: str, data: bytes, rng: random.Random) -> None:
        text = data.decode(errors="replace")
        if what in {"squeue", "sacct"}:
            read_jobs(jobs.read_squeue if what == "squeue" else jobs.read_sacct, text)
        elif what in {"sinfo", "partitions", "associations"}:
            read_cluster(what, text)
        elif what == "hosts":
            expand(text)
        else:
            readers[what](text)

    texts = {
        "squeue": f"{squeue}\n{array}\n", "sacct": f"{sacct}\n", "scontrol show job": f"{show}\n",
        "scontrol show config": config, "sinfo": f"{sinfo}\n", "partitions": f"{partition}\n",
        "associations": f"{association}\n", "hosts": "rack[1-2]node[03-10,12],login1",
    }  # fmt: skip
    yield Target(
        name="Slurm's commands", examples=[Example(value=text, what=what) for what, text in texts.items()], read=read
    )


def printed_by_ranks() -> Target:
    """What NCCL writes for a rank, and what the ranks of a deep check print."""
    from clusterddp.facts.checks import to_json
    from clusterddp.facts.deep_check import MARK, judge_ranks, read_findings
    from clusterddp.network.nccl_log import merge, read_transport

    def read(what: str, data: bytes, rng: random.Random) -> None:
        text = data.decode(errors="replace")
        if what == "nccl":
            merge([found] if (found := read_transport(text)) else [read_transport(nccl)])  # type: ignore[list-item]
            return
        findings = list(read_findings(text))
        to_json(judge_ranks(findings, world_size=2, state="FAILED", run="run-1"))

    nccl = (
        "n1:7:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>\n"
        "n1:7:9 [0] NCCL INFO Using network IB\nn1:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0\n"
    )
    train = {"model": "a", "precision": "fp32", "batch": 8, "step_ms": 1.5, "images_per_s": 9.0, "checkpoint_s": 0.1}
    sizes = {"sizes": [{"bytes": 1024, "ms": 0.1, "bus_gb_per_s": 0.2}]}
    link = {"hosts": ["<script>", "n"], "mbyte_per_s": 9.0, "latency_ms": 0.1, "rated_mbyte_per_s": 125.0}
    found = [("train", train), ("all_reduce", sizes), ("compile", {"seconds": 3.0}), ("links", link)]
    lines = [MARK + json.dumps({"rank": 0, "host": "<script>", "probe": probe, "found": it}) for probe, it in found]
    lines += [MARK + json.dumps({"rank": 1, "host": "n", "probe": "train", "error": "<script>"})]
    examples = [Example(value=nccl, what="nccl"), *(Example(value=line, what="deep check") for line in lines)]
    return Target(name="what ranks print", examples=examples, read=read)


def printed_by_ssh(root: Path) -> Iterator[Target]:
    from clusterddp.places.ssh.keys import _parse
    from clusterddp.ranks.launched import find_place

    key = "AAAAC3NzaC1lZDI1NTE5AAAAIJ0000000000000000000000000000000000000000000"
    known = (
        f"# Host gpu01 found: line 3\ngpu01 ssh-ed25519 {key}\n"
        f"# Host gpu01 found: line 4 CA\n@cert-authority * ssh-ed25519 {key}\n"
    )

    def read_keys(what: Any, data: bytes, rng: random.Random) -> None:
        _parse(data.decode(errors="replace"), root / "known_hosts")

    yield Target(name="ssh-keygen -F", examples=[Example(value=known)], read=read_keys)
    torchrun = {
        "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    srun = {
        "SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "2", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_RESTART_COUNT": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    }  # fmt: skip
    mpirun = {
        "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1",
        "PMIX_SERVER_URI4": "prterun-n1-1@0;tcp4://10.0.0.1:1", "PMIX_NAMESPACE": "prterun-n1-1@1",
        "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1,10.1.0.1:1", "OMPI_MCA_orte_node_regex": "n[1:1-2]@0(2)",
    }  # fmt: skip
    pods = {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }

    def read_environment(what: Any, data: bytes, rng: random.Random) -> None:
        lines = data.decode("utf-8", "surrogateescape").split("\n")
        find_place(dict(line.partition("=")[::2] for line in lines if line.partition("=")[1]))

    examples = [
        Example(value="\n".join(f"{name}={value}" for name, value in each.items()))
        for each in (torchrun, srun, mpirun, pods)
    ]
    yield Target(name="variables of launchers", examples=examples, read=read_environment)


def specs(root: Path) -> Iterator[Target]:
    from clusterddp.errors import SpecError
    from clusterddp.spec.hosts import parse_hosts, read_hostfile
    from clusterddp.spec.load import load_spec
    from clusterddp.spec.tree import format_spec_error

    file = root / "work" / "read.yaml"

    def load(**how: Any) -> None:
        try:
            resolved = load_spec(file, environ={}, **how)
        except SpecError as error:
            text = format_spec_error(error)
            if not text.isprintable() and COMMANDS_A_TERMINAL.search(text):
                raise AssertionError(repr(text)) from error
            return
        resolved.changes()

    def read_spec(what: Any, data: bytes, rng: random.Random) -> None:
        file.write_bytes(data)
        load()

    texts = [path.read_text() for path in sorted(JOBS.rglob("*.yaml"))]
    small = (
        "name: a\nresources: {nodes: 2, time: 1-00:00:00, memory_gb: 4}\nenv: {A: b}\n"
        "slurm: {mail_user: x}\ntrain: {dataset: shapes}\n"
    )
    yield Target(name="specs", examples=[Example(value=text) for text in (small, *texts)], read=read_spec)

    def read_values(what: str, data: bytes, rng: random.Random) -> None:
        text = data.decode("utf-8", "surrogateescape")
        file.write_text(small)
        if what == "argument":
            load(overrides=[text])
        elif what == "hosts":
            load(hosts=parse_hosts(text), flags={"launcher": "ssh"})
        else:
            (root / "work" / "hostfile").write_bytes(data)
            load(hosts=read_hostfile(root / "work" / "hostfile"), flags={"launcher": "ssh"})

    arguments = (
        *("train.lr=0.2", "+env.NAME=1", "~train.epochs", "resources.time=1-02:03:04", "train.epochs=4", "restarts=2"),
        *(
            "resources.memory_gb=1.5",
            "network.master_port=29500",
            'entry={script: "a.py", args: [1, x]}',
            "secrets=[HF_TOKEN]",
        ),
        *("ssh.hosts=[gpu01, {host: gpu02, gpus: 4}]", "train.amp=true", "network.interface=eth0", "device=cpu"),
    )
    examples = [Example(value=text, what="argument") for text in arguments]
    examples += [Example(value=text, what="hosts") for text in ("a:4,b:4", "gpu[01-04],me@x", "fe80::1")]
    examples += [Example(value="gpu01 slots=8\n# x\ngpu[02-04] gpus = 4\nn:2\n", what="hostfile")]
    yield Target(name="values of a spec", examples=examples, read=read_values, reads_examples=False)


def imported(root: Path) -> Target:
    from clusterddp.importing.reading import import_files

    batch = (
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1\n#SBATCH --gres=gpu:4\n#SBATCH -t 1-00:00:00\n"
        "export A=1 B='x y'\nN=\"${SLURM_NNODES:-2}\"\nmodule load cuda\nset -e\n"
        "A=2 srun torchrun --nproc_per_node 4 --nnodes $SLURM_NNODES train.py \\\n --lr 0.1 > log 2>&1\n"
    )
    accelerate = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 8\n"
        "main_process_port: 29500\n"
    )
    gluon = (
        "DDP_CONFIG:\n  AUTO_RANK_MATCH: True\n  WORLD_SIZE: 2\n  WORLD_RANK: 0\n"
        "  WOLRD_URLS: ['10.0.0.1', '10.0.0.2']\nCONFIG:\n  TRAIN:\n    EPOCH_NUM: 3\n"
    )
    files = {
        "train.slurm": batch,
        "accelerate.yaml": accelerate,
        "gluon.yaml": gluon,
        "hostfile": "a slots=4\nb slots=4\n",
    }
    files[".deepspeed_env"] = "NCCL_DEBUG=INFO\nHF_TOKEN=hunter2\n"
    kinds = {"train.slurm": "slurm", "accelerate.yaml": "accelerate", "gluon.yaml": "gluoncv", "hostfile": "hostfile"}

    def read(name: str, data: bytes, rng: random.Random) -> None:
        path = root / "work" / name
        path.write_bytes(data)
        import_files([path], kind=rng.choice((None, kinds.get(name, "env"))))  # type: ignore[arg-type]

    return Target(name="imports", examples=[Example(value=text, what=name) for name, text in files.items()], read=read)
