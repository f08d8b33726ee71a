"""What came of a batch script, by `sbatch`, by `clusterddp submit` and without Slurm, and in what they may differ."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterddp.network.hostlist import expand
from clusterddp.run.attempts import final_end
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_run
from tests.support.batch_scripts import Script
from tests.support.paths import ROOT
from tests.support.person import CLUSTERDDP
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD, SYSTEM_PATH
from tests.testbed.rack import Rack

SIDES = ("sbatch", "submit", "local")
"""Slurm's own command; ours on Slurm; ours without Slurm, by `--launcher local --cpu`."""
_ENDS = {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL"}

FIRST_JOB_ID = 70_000
_NUMBERS = {
    r"(?<!\d)[27]0\d{3}(?!\d)": "JOB",  # its number, and the port that scripts make of it
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?": "TIME",
    r"\b[WEI]\d{4} [\d:.]+ +\d+ ": "W TIME PID ",  # torch's log
    r"\d{4}-\d\d-\d\d_[\d:]+": "TIME",
    r"\dm[\d.,]+s": "SECONDS",
    r"\(?pid:? \d+\)?": "PID",
    r"(DIR)?/\S*/slurm_script\b": "SCRIPT",  # a copy of the script: Slurm's, ours
    r"365-00:00:00": "UNLIMITED",  # how Slurm shows it for some seconds
    r"(?<=:)[^:\s]*/launcher/(bin|stand_ins):": "",  # in PATH
}
"""What is another one in each job."""
_HASTE = (
    r"^srun: (Force Terminated|launch/slurm|Job step aborted|Step created)",
    r"^srun: Job \w+ step creation temporarily disabled",
    r"^(slurmstepd-|\[TIME\]).* CANCELLED AT",
)
"""Lines that come or not, by what srun hears first."""

FIELDS_THAT_DIFFER = {
    **dict.fromkeys(("JobId", "ArrayJobId"), "two jobs"),
    **dict.fromkeys(("SubmitTime", "EligibleTime", "AccrueTime", "StartTime", "EndTime", "RunTime"), "two times"),
    **dict.fromkeys(("LastSchedEval", "PreemptEligibleTime", "Priority", "Scheduler"), "two times"),
    **dict.fromkeys(("NodeList", "BatchHost", "AllocNode:Sid", "SchedNodeList"), "where Slurm has put it"),
    "SLUID": "two jobs",
    "SubmitLine": "the one of ours has its script on standard input, and our comment",
    "Command": "sbatch gets our file: the head of the script and a line that starts our process",
}
"""What `scontrol show job` says of the two jobs need not agree in these; the comment without our tag does."""

NOT_COMPARED = {
    "SLURM_JOB_SLUID": "another job",
    "SLURM_TASK_PID": "another process",
    **dict.fromkeys(("SLURM_SRUN_COMM_PORT", "SLURM_STEP_LAUNCHER_PORT"), "another srun"),
    **dict.fromkeys(("SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME"), "another time"),
    "SLURM_DISTRIBUTION": "of a heterogeneous step, and of tasks in blocks, this Slurm says cyclic or block by chance",
    "TORCHELASTIC_RUN_ID": "torchrun makes it up",
    "TORCHELASTIC_ERROR_FILE": "torchrun makes it up",
    "SHLVL": "how bash counts a command that it becomes",
    "_": "the file that bash has started: ours",
    "BASH_FUNC__module_raw%%": "Debian's modules.sh goes by the process's name: bash, and slurm_script under sbatch",
    "BASH_ENV": "our functions stand before what conda and modules put into PATH; the user's file is read by ours",
    **dict.fromkeys(("OMPI_ARGV", "OMPI_COMMAND"), "mpirun's word for our task, which holds the user's program"),
}
_MADE_UP = ("PMIX_", "OMPI_MCA_", "OMPI_FILE_", "OMPI_APP_", "ORTE_", "PMI_")
"""What mpirun makes for a job has ids and ports of its own."""
_DEVICES = {"CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "ROCR_VISIBLE_DEVICES"}
_DEVICES |= {"ZE_AFFINITY_MASK"}
"""Which ones are free is another question for each job."""
_HOOK = str(ROOT / "clusterddp/node/hook")
"""A directory of ours in PYTHONPATH, for stacks and use."""

_RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
)
ADDED = {
    **dict.fromkeys(_RANK_VARIABLES, "a task of srun has torchrun's variables where it has none"),
    **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), "the network of the ranks"),
    **dict.fromkeys(("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"), "NCCL's log, in a file of the run"),
    "TORCH_FR_BUFFER_SIZE": "torch's record of collectives, for the stacks of a hang",
    "PWD": "a command of ours is a script of sh, which sets it",
}
"""Variables that a process may have by submit alone, and why; CLUSTERDDP_* too."""


@dataclass(kw_only=True)
class Outcome:
    """What one side has left; texts are those of a job of no number, on no host, in no directory."""

    said: str = ""
    """What the command that submits has printed."""
    code: int = 0
    jobs: list[dict[str, str]] = field(default_factory=list)
    files: dict[str, list[str]] = field(default_factory=dict)
    """Each file that the job has left -> its lines, sorted."""
    probed: list[dict[str, Any]] = field(default_factory=list)
    run_dir: Path | None = None

    @property
    def states(self) -> list[str]:
        return [job["JobState"] for job in self.jobs]


@dataclass(kw_only=True)
class Side:
    """A script that is submitted in one of the ways, in a directory of its own."""

    rack: Rack
    script: Script
    how: str
    job_id: str = ""

    @property
    def path(self) -> Path:
        return self.rack.dir / "shared" / self.how / self.script.name

    def start(self) -> Outcome:
        """Submit; return what the command says, and where the run is."""
        self.path.mkdir(parents=True)
        self.script.write(self.path)
        done = self.rack.run(HEAD, self.command(), cwd=self.path, env=self.environ(), check=False)
        outcome = Outcome(said=done.stdout + done.stderr, code=done.returncode)
        if done.returncode == 0:
            self.job_id = done.stdout.strip() if self.how == "sbatch" else self.job_of_run(outcome, done.stdout)
        return outcome

    def command(self) -> list[str]:
        script = self.script
        if self.how == "sbatch":
            return ["sbatch", "--parsable", *(f"--{option}" for option in script.options), script.file, *script.args]
        pairs = [option.split("=", 1) for option in script.options]
        options = [f'slurm.{key}="{value}"' if "," in value else f"slurm.{key}={value}" for key, value in pairs]
        foreign = [] if script.plain else ["--from", "slurm"]
        foreign += ["--launcher", "local", "--cpu"] if self.how == "local" else []
        args = ["--", *script.args] if script.args else []
        return [*CLUSTERDDP, "submit", *foreign, "-o", "json", script.file, *options, *args]

    def environ(self) -> dict[str, str]:
        """Return the variables of the user's shell."""
        conda = self.rack.dir / "shared" / "conda"
        python_dir = str(Path(sys.executable).parent)
        open_mpi = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
        more = {"CONDA_ROOT": str(conda), "PYTHON_DIR": python_dir, "PATH": f"{python_dir}:{SYSTEM_PATH}", **open_mpi}
        return {**more, "PYTHONDONTWRITEBYTECODE": "1", **self.script.environ}

    def job_of_run(self, outcome: Outcome, answer: str) -> str:
        """Find the run, and its job, by what submit has answered."""
        words = json.loads(answer)
        outcome.run_dir = Path(words["run_dir"]) if "run_dir" in words else self.path / "runs" / words["sweep"]
        return str(words.get("job_id"))

    def show(self) -> list[dict[str, str]]:
        """Ask Slurm for the job, or for the jobs of its array."""
        lines = self.rack.run(HEAD, ["scontrol", "show", "job", "-o", self.job_id], check=False).stdout.splitlines()
        rows = [dict(re.findall(r"(?<!\S)([A-Z]\S*?)=(.*?)(?= [A-Z]\S*?=|\s*$)", line)) for line in lines]
        return sorted(rows, key=lambda row: row.get("ArrayTaskId", ""))

    def await_end(self, within_s: float = 240) -> list[dict[str, str]]:
        """Wait until the job is over."""
        rows: list[dict[str, str]] = []

        def over() -> bool:
            rows[:] = self.show()
            return bool(rows) and all(row.get("JobState") in _ENDS for row in rows)

        wait_until(over, within_s, what=lambda: (self.script.name, self.how, rows), patience=1, interval_s=0.3)
        return rows

    def collect(self, outcome: Outcome) -> Outcome:
        """Wait for the end and read what is left."""
        runs = self.runs_without_slurm(outcome)
        if runs:
            wait_until(lambda: all(map(final_end, runs)), 240, what=self.script.name, patience=1, interval_s=0.3)
            rows = [{"JobState": end.outcome} for end in map(final_end, runs) if end]
        else:
            rows = self.await_end() if self.job_id else []
        plain = Plain.of(self.path, rows, runs)
        outcome.jobs = [job_facts(row, plain) for row in rows]
        for path in sorted(self.path.rglob("*")):
            if path.is_file() and self.is_left_by_the_job(path.relative_to(self.path)):
                text = path.read_text(errors="surrogateescape")
                outcome.files[plain.text(str(path.relative_to(self.path)))] = plain.lines(text)
        for run in runs:
            if (output := run.launcher_dir / "job.log").exists():
                task = f"_{run.name.rpartition('.')[2]}" if len(runs) > 1 else ""
                outcome.files[f"slurm-JOB{task}.out"] = plain.lines(output.read_text(errors="surrogateescape"))
        probes = [json.loads(path.read_text()) for path in (self.path / "probed").glob("*.json")]
        outcome.probed = sorted((plain.value(probe) for probe in probes), key=order)
        return outcome

    def runs_without_slurm(self, outcome: Outcome) -> list[RunDir]:
        """List the runs of a submit that was to do without Slurm: one, or those of an array's tasks."""
        if self.how != "local" or outcome.run_dir is None:
            return []
        return [RunDir(record.parent) for record in sorted(outcome.run_dir.rglob("run.json"))]

    def is_left_by_the_job(self, path: Path) -> bool:
        """Say whether a file is neither given nor a record; torchrun names the directories of its logs by chance."""
        given = {self.script.file, *self.script.files}
        records = {"probed", "runs", "torchlogs", "__pycache__"}
        return str(path) not in given and not records & set(path.parts) and path.suffix != ".py"


@dataclass(kw_only=True)
class Plain:
    """How the names and numbers of one job are taken out of its texts."""

    words: dict[str, str]
    """Pattern -> what stands for it."""

    @classmethod
    def of(cls, path: Path, rows: list[dict[str, str]], runs: Sequence[RunDir] = ()) -> Plain:
        words = {re.escape(str(path)): "DIR", **_NUMBERS}
        for run in runs:
            number = json.loads((run.launcher_dir / "pretended_job.json").read_text())["job_id"]
            own = (number, str(read_run(run).job_id).partition("_")[0], 20_000 + int(number) % 10_000)
            words[rf"(?<!\d)({'|'.join(map(str, own))})(?!\d)"] = "JOB"
        nodes = expand(rows[0].get("NodeList", "")) if len(rows) == 1 and "node" in rows[0].get("NodeList", "") else []
        for index, node in enumerate(nodes):
            words[rf"{node}\b"] = f"HOST{index}"
            words[rf"\b10\.77\.0\.{10 + int(node[4:])}\b"] = f"ADDRESS{index}"
        for number in range(1, 9) if len(runs) == 1 else ():
            words[rf"\b127\.0\.0\.{number}\b"] = f"HOST{number - 1}"
        return cls(words=words | {r"node\d\b|\b127\.0\.0\.\d\b": "HOST", r"\b10\.77\.0\.1\d\b": "ADDRESS"})

    def text(self, text: str) -> str:
        text = re.sub(r"(node|127\.0\.0\.)\[[\d,-]+\]", lambda found: ",".join(expand(found[0])), text)
        for pattern, word in self.words.items():
            text = re.sub(pattern, word, text)
        return text

    def value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        return {key: self.value(item) for key, item in value.items()} if isinstance(value, dict) else value

    def lines(self, text: str) -> list[str]:
        """Return the lines of an output, sorted, without those that depend on whose message is first."""
        lines = self.text(text).splitlines()
        kept = [line for line in lines if not re.search("|".join(_HASTE), line)]
        return sorted(part for line in kept for part in each_task(line))


def each_task(line: str) -> list[str]:
    """Split `tasks 0-1: Killed` into a line for each task: srun says it of those that it has heard of by then."""
    found = re.fullmatch(r"(.*)\btasks? ([\d,-]+)(: .*)", line)
    return [f"{found[1]}task {task}{found[3]}" for task in expand(f"[{found[2]}]")] if found else [line]


def order(probe: Mapping[str, Any]) -> list[Any]:
    """Give the place of a process among those of its job."""
    environ = probe["environ"]
    first = ("SLURM_STEP_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    rank = str(probe["reduced"]["rank"] if "reduced" in probe else "")
    last = (probe["host"], environ.get("LOCAL_RANK", ""), environ.get("TORCHELASTIC_RESTART_COUNT", ""))
    return [
        environ.get("SLURM_ARRAY_TASK_ID", ""),
        probe["argv"],
        *(environ.get(name, "") for name in first),
        rank,
        *last,
    ]


def job_facts(row: Mapping[str, str], plain: Plain) -> dict[str, str]:
    """Return what the two jobs must have in common."""
    facts = {name: plain.text(value) for name, value in row.items() if name not in FIELDS_THAT_DIFFER}
    if comment := re.sub(r"(; )?clusterddp [\w.-]+ \w+ *$", "", facts.pop("Comment", "")).strip():
        facts["Comment"] = comment
    return facts


def differences(first: Outcome, second: Outcome, *, racy: bool = False) -> list[str]:
    """List in what the second outcome differs from the first without a reason; racy: of outputs, exit codes count."""
    found = []
    if (first.code == 0) != (second.code == 0):
        return [f"submitting: {first.code} {first.said!r}, {second.code} {second.said!r}"]
    for number, (one, two) in enumerate(zip(first.jobs, second.jobs, strict=False)):
        found += [f"job {number}: {words}" for words in differing(one, two)]
    if len(first.jobs) != len(second.jobs):
        found.append(f"{len(first.jobs)} jobs, {len(second.jobs)} jobs")
    if racy:
        files = [
            {name: [line for line in lines if line.isdecimal()] for name, lines in outcome.files.items()}
            for outcome in (first, second)
        ]
    else:
        files = [first.files, second.files]
    found += [f"file {words}" for words in differing(*files)]
    if len(first.probed) != len(second.probed):
        return [*found, f"{len(first.probed)} processes, {len(second.probed)} processes"]
    for one, two in zip(first.probed, second.probed, strict=True):
        found += [f"process {shlex.join(one['argv'])}: {words}" for words in of_processes(one, two)]
    return list(dict.fromkeys(found))


WITHOUT_SLURM = {
    **dict.fromkeys(("SLURM_CLUSTER_NAME", "SLURM_WORKING_CLUSTER", "SLURM_CONF"), "there is no cluster"),
    **dict.fromkeys(("SLURM_JOB_PARTITION", "SLURM_NODE_ALIASES", "TMPDIR", "HOSTNAME", "MAIL"), "there is no cluster"),
    **dict.fromkeys(("SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"), "there is no cluster"),
    **dict.fromkeys(("SLURM_LAUNCH_NODE_IPADDR", "SLURM_SRUN_COMM_HOST", "SRUN_DEBUG"), "another srun"),
    **dict.fromkeys(("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_NODE"), "nothing limits memory"),
    **dict.fromkeys(("CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS"), "--cpu hides the GPUs"),
    **dict.fromkeys(("GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"), "--cpu hides the GPUs"),
    "SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0": "this Slurm's name of it",
    "SLURM_CPUS_ON_NODE": "of a step: Slurm counts its cores",
    **dict.fromkeys(("SLURM_GET_USER_ENV", "SHELL"), "with --export sbatch adds what a login has"),
    "SLURM_JOB_DEPENDENCY": "the queue is Slurm's",
}
"""Variables that differ where there is no Slurm, and why."""
FACTS_WITHOUT_SLURM = ("argv", "python", "flags", "cwd", "umask", "nice", "signals", "stdin", "reduced")
_SAID_BY_OTHERS = (*_HASTE, r"^srun: ", r"^slurmstepd", r"^clusterddp: ", r"^W TIME PID ", r"^Try ")


def differences_without_slurm(slurm: Outcome, local: Outcome, *, racy: bool = False) -> list[str]:
    """List in what a run without Slurm differs from that of sbatch; hosts, devices and what Slurm says may."""
    if (slurm.code == 0) != (local.code == 0):
        return [f"submitting: {slurm.code} {slurm.said!r}, {local.code} {local.said!r}"]
    sides = (slurm, local)
    found = differing(*({"states": sorted(each.states), "processes": len(each.probed)} for each in sides))
    found += [f"file {words}" for words in differing(*(said_by_script(each, racy=racy) for each in sides))]
    for one, two in zip(slurm.probed, local.probed, strict=False):
        facts = [{key: probe.get(key) for key in FACTS_WITHOUT_SLURM} for probe in (one, two)]
        environs = [compared(probe["environ"]) for probe in (one, two)]
        skipped = {*WITHOUT_SLURM, *ADDED}
        if "OMPI_COMM_WORLD_RANK" in one["environ"]:  # mpirun may have started it by srun, or not
            skipped |= {name for each in environs for name in each if name.startswith("SLURM_")}
        environs = [{name: value for name, value in each.items() if name not in skipped} for each in environs]
        if environs[0].get("PYTHONPATH") == ".":
            environs[0]["PYTHONPATH"] = "DIR"  # ours becomes absolute
        words = [*differing(*facts), *(f"environ {words}" for words in differing(*environs))]
        found += [f"process {shlex.join(one['argv'])}: {each}" for each in words]
    return list(dict.fromkeys(found))


def said_by_script(outcome: Outcome, *, racy: bool) -> dict[str, list[str]]:
    """Return the files that have lines which are neither Slurm's, nor ours, nor torchrun's; racy: those of numbers."""
    kept = str.isdecimal if racy else lambda line: not re.search("|".join(_SAID_BY_OTHERS), line)
    files = {Path(name).name: [line for line in lines if kept(line)] for name, lines in outcome.files.items()}
    return {name: lines for name, lines in files.items() if lines}


def of_processes(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    """List in what two processes differ."""
    facts = [{key: value for key, value in probe.items() if key != "environ"} for probe in (one, two)]
    environs = [compared(probe["environ"]) for probe in (one, two)]
    environs[1] = {name: value for name, value in environs[1].items() if name in environs[0] or name not in ADDED}
    return [*differing(*facts), *(f"environ {words}" for words in differing(*environs))]


def compared(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that two processes must have in common, as they must be."""
    ours = ("CLUSTERDDP_", *_MADE_UP)
    kept = {name: value for name, value in environ.items() if name not in NOT_COMPARED and not name.startswith(ours)}
    folders = kept.get("PATH", "").split(":")
    kept["PATH"] = ":".join(part for part in folders if not part.endswith(("/launcher/bin", "/launcher/stand_ins")))
    parts = [part for part in kept.pop("PYTHONPATH", _HOOK).split(":") if part != _HOOK]
    kept |= {"PYTHONPATH": ":".join(parts)} if parts else {}
    for name in _DEVICES & set(kept):
        kept[name] = f"{len(kept[name].split(','))} of them"
    if kept.get("MASTER_PORT") != "JOB":  # torchrun has looked for a free one
        kept.pop("MASTER_PORT", None)
    return kept


def differing(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """List the keys whose values differ."""
    return [
        f"{key}: {one.get(key, '(none)')!r}, {two.get(key, '(none)')!r}"
        for key in sorted({*one, *two})
        if one.get(key) != two.get(key)
    ]


def make_conda(root: Path) -> None:
    """Make an environment as conda has them: a Python and a torchrun of its own, which `activate` puts first."""
    env = root / "envs/torch"
    (env / "bin").mkdir(parents=True)
    base = Path(sys.base_prefix, "bin", Path(os.path.realpath(sys.executable)).name)
    (env / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    packages = env / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    own = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "torch.pth").write_text("\n".join(own) + "\n")
    for name in ("python", "python3"):
        (env / "bin" / name).symlink_to(base)
    text = "import sys\nfrom torch.distributed.run import main\nsys.exit(main())\n"
    (env / "bin/torchrun").write_text(f"#!{env}/bin/python\n{text}")
    (env / "bin/torchrun").chmod(0o755)
