"""Time from a fault to the recorded end, of an unchanged batch script (srun, torchrun in srun) and of a spec, on Slurm.

    python benchmarks/slurm_faults.py [ROUNDS [FAULT ...]]    (root: it starts racks)

Two nodes with two ranks each, which wait. Faults: raise (rank 3), kill (-9, rank 3), supervisor (-9, node 1), power (of
node 1; Slurm counts it as down after 20 s), scancel, preempt (with a requeue: the end of the first attempt), limit (of
1 minute). The time is that of `end.json` on the machine's clock, less that of the fault; `limit` counts from Slurm's
end of the job. One line of JSON per run, then the table.
"""

from __future__ import annotations

import collections
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable

from clusterddp.run.attempts import AttemptEnd, read_end
from clusterddp.run.directory import RunDir
from tests.support.batch_faults import FORMS, TRAIN, await_up, role_of, start
from tests.support.gang_runs import processes_with
from tests.support.slurm_person import SlurmPerson
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD, RackPlan
from tests.testbed.rack import Rack, running_rack

OPTIONS = {"limit": "--time=1", "preempt": "--requeue --open-mode=append --mem=1000", "power": "--no-requeue"}
FORMS_AND_SPEC = [*FORMS, "spec"]
MORE = {"limit": ', time: "0:01:00"', "preempt": ", memory_gb: 1"}


def start_form(rack: Rack, form: str, fault: str, name: str) -> tuple[SlurmPerson, RunDir]:
    """Start the ranks of one form of the job and wait until they run and are supervised."""
    if form != "spec":
        person, run = start(rack, form, name, OPTIONS.get(fault, ""))
        wait_until(lambda: any(run.attempt(0).steps.glob("*/start.json")), 60)
        return person, run
    person = SlurmPerson.at(rack, f"{name}-{form}")
    restarts = int(fault == "preempt")
    person.write_spec(
        f"restarts: {restarts}\nsnapshot: false", resources=f"{{nodes: 2, procs_per_node: 2{MORE.get(fault, '')}}}"
    )
    (person.path / "entry.py").write_text(TRAIN)
    run = RunDir(person.path / "runs" / person.clusterddp("submit", "job.yaml").stdout.strip())
    await_up(person)
    wait_until(run.attempt(0).start.exists, 60)
    return person, run


def inject(rack: Rack, person: SlurmPerson, run: RunDir, fault: str) -> float:
    """Cause the fault; return when."""
    job = person.queue()[0].split()[0]
    token = person.record(run).token
    supervisors = [pid for pid, _ in processes_with(f"CLUSTERDDP_COOKIE={token}.") if role_of(pid).endswith(".s1")]
    actions: dict[str, Callable[[], object]] = {
        "raise": lambda: (person.path / "go").write_text("raise"),
        "kill": lambda: (person.path / "go").write_text("kill"),
        "supervisor": lambda: os.kill(supervisors[0], signal.SIGKILL),
        "power": lambda: rack.power_off("node2"),
        "scancel": lambda: rack.run(HEAD, ["scancel", job]),
        "preempt": lambda: rack.run(HEAD, ["sbatch", "-phigh", "-N4", "--exclusive", "-o/dev/null", "--wrap=sleep 1"]),
        "limit": lambda: wait_until(lambda: person.job(job)["JobState"] != "RUNNING", 60),
    }
    began = time.time()
    actions[fault]()
    return time.time() if fault == "limit" else began


def play(rack: Rack, form: str, fault: str, name: str) -> tuple[float, AttemptEnd]:
    """Return the seconds from the fault to the end, and the end."""
    person, run = start_form(rack, form, fault, name)
    began = inject(rack, person, run, fault)
    wait_until(run.attempt(0).end.exists, 60)
    end = read_end(run.attempt(0))
    assert end is not None
    rack.run(HEAD, ["scancel", "--user=root"], check=False)
    wait_until(lambda: person.queue() == [], 60)
    return end.ended - began, end


def main() -> int:
    rounds, faults = int((sys.argv[1:2] or ["3"])[0]), sys.argv[2:] or ["raise", "kill", "supervisor", "scancel"]
    times: dict[str, dict[str, list[float]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for fault in faults:
        for number in range(rounds):
            for forms in ([form] for form in FORMS_AND_SPEC) if fault == "power" else [FORMS_AND_SPEC]:
                with running_rack(RackPlan(slurmd_timeout_s=20, debian_hosts=False)) as rack:
                    for form in forms:
                        seconds, end = play(rack, form, fault, f"{fault}-{number}")
                        times[fault][form].append(seconds)
                        line = {"fault": fault, "form": form, "s": round(seconds, 2), "load": os.getloadavg()[0]}
                        print(json.dumps(line | {"outcome": end.outcome, "reason": end.reason}), flush=True)
    for fault, by_form in times.items():
        print(fault, *(f"{form} {spell(values)}" for form, values in by_form.items()), sep=" | ")
    return 0


def spell(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    sys.exit(main())
