"""Explains in a sentence why a job waits or ended: what Slurm's word means, and what the user can do.

Source of the words: squeue(1), "JOB REASON CODES"; slurm, src/common/slurm_protocol_defs.c, job_reason_string.
"""

from __future__ import annotations

import re
import time

from clusterddp.places.slurm.queue import Job
from clusterddp.system.own_directory import account_name

_WAITS = {
    "resources": "for nodes to become free",
    "priority": "for its turn: jobs with a higher priority are before it",
    "dependency": "for a job that it depends on",
    "dependencyneversatisfied": "for ever: a job that it depends on did not end as it should have; cancel this run",
    "begintime": "until its begin time",
    "jobarraytasklimit": "for its turn in the array, which runs only so many tasks at once",
    "jobhelduser": "because it is held; scontrol release {job} lets it go",
    "jobheldadmin": "because an administrator holds it; ask them",
    "licenses": "for licences that others use",
    "reservation": "for its reservation to begin",
    "reservationdeleted": "for a reservation that was deleted; cancel it, and submit it without",
    "nodedown": "for a node that is down",
    "nodes required for job are down, drained or reserved for jobs in higher priority partitions": (
        "for nodes that are down, drained or reserved; sinfo -R lists them with the reason"
    ),
    "partitiondown": "because its partition is down: it takes jobs and starts none",
    "partitioninactive": "because its partition is inactive; another one may be open (sinfo)",
    "partitionnodelimit": "for ever: it asks for more nodes than its partition {partition} allows, or has",
    "partitiontimelimit": "for ever: it asks for more time than its partition {partition} allows; lower resources.time",
    "partitionconfig": "for ever: its partition {partition} cannot give what it asks for (scontrol show partition)",
    "timelimit": "for ever: it asks for more time than it may have; lower resources.time",
    "invalidaccount": "for ever: its account is not valid; sacctmgr show associations user=$USER lists yours",
    "accountnotallowed": "for ever: its account may not use the partition {partition}",
    "invalidqos": "for ever: its QOS is not valid for you",
    "qosnotallowed": "for ever: its QOS may not be used in the partition {partition}",
    "qosusagethreshold": "because its QOS does not let it run at your usage so far",
    "badconstraints": "for ever: no node has what it asks for (constraint, nodes, memory, GPUs)",
    "maxmemperlimit": "for ever: it asks for more memory per CPU or node than is allowed; lower resources.memory_gb",
    "accountingpolicy": "because a limit of your account or QOS is reached",
    "prolog": "for the prolog of the cluster to end",
    "none": "for the scheduler to look at it",
    "": "for the scheduler to look at it",
    "maxrequeue": "for ever: it was started again too often",
    "jobholdmaxrequeue": "because it was started again too often, and is held; scontrol release {job} lets it go",
}
_FAMILIES = (
    (
        r"launch.failed.requeued.held",
        "because a node could not start it, and it is held; "
        "the nodes must see the run's directory; then scontrol release {job} lets it go",
    ),
    (
        r"user.env.retrieval.failed.*",
        "because a node could not load its user's login environment, and it is held: a shell start-up file there "
        "(~/.profile, ~/.bash_profile) ends, waits or fails; mend it, then scontrol release {job} lets it go",
    ),
    (r".*requeued.*held.*", "because it was queued again and is held; scontrol release {job} lets it go"),
    (r"reqnodenotavail.*unavailablenodes: *(.+)", "for nodes that are down, drained or reserved: {0}"),
    (r"reqnodenotavail.*", "for nodes that are down, drained or reserved now, or soon (a maintenance?)"),
    (r"qosmax(.+?)peruser(?:limit)?", "until some of your jobs end: its QOS lets one user have only so much ({0})"),
    (r"qosmax(.+?)(?:perjob|minutesperjob)(?:limit)?", "for ever: it asks for more than its QOS lets one job have"),
    (r"qos(?:grp|max|job|resource|time)(.*)", "until other jobs end: a limit of its QOS is reached"),
    (r"qosmin(.*)", "for ever: it asks for less than its QOS wants"),
    (r"assocmax(.+?)perjob(?:limit)?", "for ever: it asks for more than your account lets one job have"),
    (r"assocmax(.*)", "until some of your jobs end: your account lets you have only so much"),
    (r"(?:assocgrp|association)(.*)", "until other jobs of the account end: a limit of the account is reached"),
)
_HELD = ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_ENDS = {
    "TIMEOUT": "its time was up before the ranks had stopped",
    "NODE_FAIL": "a node was lost",
    "OUT_OF_MEMORY": "it used more memory than it was given; ask for more with resources.memory_gb",
    "PREEMPTED": "another job took its place, and Slurm did not queue it again",
    "BOOT_FAIL": "a node did not boot",
    "DEADLINE": "it could no longer meet its deadline",
    "LAUNCH_FAILED": "a node could not start it",
}
_ENDED_BECAUSE = {
    "joblaunchfailure": (
        "a node could not start it (usually it does not see the run's directory), or its script was killed"
    ),
    "badconstraints": "no node has what it asks for (constraint, nodes, memory, GPUs)",
    "dependencyneversatisfied": "a job that it depends on did not end as it should have",
    "prolog": "the cluster's prolog failed",
    "raisedsignal": "its batch script was ended by a signal",
    "partitiontimelimit": "it asked for more time than the partition allows",
    "systemfailure": "Slurm itself failed",
    "invalidaccount": "its account is not valid",
    "invalidqos": "its QOS is not valid",
}
_EMPTY_REASONS = {"", "none", "nonzeroexitcode"}
_REFUSALS = (
    (
        r"no partition specified",
        "slurm.partition=NAME; sinfo -s lists them, clusterddp init --launcher slurm chooses one",
    ),
    (r"invalid partition", "slurm.partition=NAME; sinfo -s lists the cluster's"),
    (r"invalid account|account/partition", "slurm.account=NAME; sacctmgr show associations user=$USER lists yours"),
    (
        r"invalid qos|qos not permitted",
        "slurm.qos=NAME; sacctmgr show associations user=$USER format=account,qos lists yours",
    ),
    (
        r"generic resource|gres|invalid gpu|unrecognized option '--gpus",
        "a site may want GPUs in its own form: slurm.gres=gpu:8, or with their type slurm.gres=gpu:h100:8; "
        "sinfo -o '%P %G' lists types and numbers",
    ),
    (
        r"node configuration is not available",
        "no node of the partition has so many GPUs, cores or so much memory: sinfo -o '%P %D %c %m %G' lists what they "
        "have; resources.gpus_per_node, cpus_per_task and memory_gb ask for it, slurm.gres=gpu:h100:8 for a type",
    ),
    (r"accounting/qos policy", "sacctmgr show qos, and show associations user=$USER, list your limits"),
    (r"unable to accept job", "the queue is full (MaxJobCount of scontrol show config): submit it later"),
    (r"time limit", "resources.time; sinfo -o '%P %l' lists what partitions allow"),
)
"""sbatch's refusals, and what to do about each. Source: slurm, src/common/slurm_errno.c."""


def explain_waiting(job: Job, *, was_started: bool = False, now: float | None = None) -> str:
    """Explain what a job waits for, with its start if Slurm expects one; `was_started`: it waits to start again."""
    if job.state in _HELD and job.reason.lower() in {"", "none", "begintime"}:
        text = f"because it is held ({job.state}); scontrol release {job.job_id} lets it go"
    else:
        text = _waits_for(job, was_started=was_started)
        if job.reason:
            text += f" ({job.reason})"
    moment = time.time() if now is None else now
    if job.started and job.started > moment and "held" not in job.reason.lower():
        text += f"; Slurm expects it to start {_when(job.started, moment)}"
    return f"job {job.job_id} waits {text}"


def explain_end(job: Job, *, began: bool = True) -> str:
    """Explain how a job ended by Slurm's state and reason: `job 17 ended: NODE_FAIL, a node was lost`.

    `began`: false for a job whose script did not begin, and which clusterddp did not cancel.
    """
    if job.state == "CANCELLED":
        text = f"job {job.job_id} was cancelled"
        if job.cancelled_by is not None:
            text += f" by {account_name(job.cancelled_by)}"
        elif not began:
            text += (
                " before its script began, and not by clusterddp: by scancel, or by Slurm itself, where a node could "
                "not prepare it (its prolog, the login environment); slurmd's log there has the reason"
            )
    elif job.state == "NODE_FAIL" and not began:
        text = (
            f"job {job.job_id} ended: NODE_FAIL: its first node was lost before the job's script began, or did not "
            "begin it in time; sinfo -R names nodes that are down, and slurmd's log on a node that is up has the reason"
        )
    else:
        text = f"job {job.job_id} ended: {job.state}"
        if job.state in _ENDS:
            text += f", {_ENDS[job.state]}"
    because = _ENDED_BECAUSE.get(job.reason.lower())
    if because:
        text += f"; {because} ({job.reason})"
    elif job.state not in {"CANCELLED", "TIMEOUT"} and job.reason.lower() not in {*_EMPTY_REASONS, job.state.lower()}:
        text += f" ({job.reason})"
    code, _, signal = job.exit_code.partition(":")
    if job.state == "FAILED" and code not in {"", "0"}:
        text += f", exit code {code} of the job's script"
    elif job.state == "FAILED" and signal not in {"", "0"}:
        text += f", signal {signal} to the job's script"
    return text


def advise_refusal(words: str) -> str | None:
    """Return what to do about sbatch's refusal of a job; None when no advice is known."""
    return next((advice for pattern, advice in _REFUSALS if re.search(pattern, words, re.IGNORECASE)), None)


def _waits_for(job: Job, *, was_started: bool) -> str:
    reason = job.reason.replace("_", " ").lower()
    if reason == "begintime" and was_started:
        return "for Slurm's own pause before a job is started again, two minutes by default"
    if reason in _WAITS:
        return _WAITS[reason].format(job=job.job_id, partition=job.partition)
    for pattern, words in _FAMILIES:
        match = re.fullmatch(pattern, job.reason, re.IGNORECASE)
        if match:
            return words.format(*match.groups(), job=job.job_id)
    return "for a reason of Slurm's"


def _when(moment: float, now: float) -> str:
    """`at 14:05` within a day, `on 2026-11-22 at 14:05` later."""
    form = "at %H:%M" if moment - now < 20 * 3600 else "on %Y-%m-%d at %H:%M"
    return time.strftime(form, time.localtime(moment))
