"""Batch scripts, each of one kind, for the test that runs them by `sbatch` and by `clusterddp submit`.

The scripts are the files in tests/rack/scripts; what is special about one stands here. Kinds k01 to k31 are those of
bash that a reader of bash gets wrong; the others are ways to start ranks, to use bash, and to end.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

_FOLDER = ROOT / "tests/rack/scripts"
PROBE = (ROOT / "tests/support/batch_probe.py").read_text()


@dataclass(frozen=True, kw_only=True)
class Script:
    """A batch script, and how it is submitted."""

    name: str
    text: str
    args: tuple[str, ...] = ()
    """What stands behind the script: `$@`."""
    options: tuple[str, ...] = ()
    """Options of sbatch on its line, `nodes=2`; of submit: `slurm.nodes=2`."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Further files in the directory of the submit; one that begins with `#!` can be executed."""
    file: str = "train.slurm"
    """The path of the script, from that directory."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables of the shell that submits."""
    confined: bool = False
    """It needs nodes that hold jobs to their cores."""
    ranks: bool = True
    """Some process of it is seen as a rank by clusterddp."""
    state: str = "COMPLETED"
    """How Slurm calls the job's end; `refused`: there is no job."""
    plain: bool = True
    """Its file looks like a batch script; else `--from slurm` says so."""
    racy: bool = False
    """Ranks end others, so what those have printed is a matter of time."""

    def write(self, directory: Path) -> None:
        """Make the directory of the submit: the script, its files, and the probe by every name that the script uses."""
        names = re.findall(r"[\w-]+\.py\b", self.text)
        files = dict.fromkeys([*names, "train.py"], PROBE) | dict(self.files) | {self.file: self.text}
        for name, text in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.fsencode(text))
            path.chmod(0o755 if text.startswith("#!") else 0o644)


_SPECIAL: dict[str, dict[str, Any]] = {
    "accelerate-in-srun": {"racy": True},
    "highest-exit-code": {"racy": True},
    "hook-of-conda-and-traced": {
        "files": {
            "conda": "#!/bin/sh\n# A fake.\necho 'conda() { PATH=$CONDA_ROOT/envs/$2/bin:$PATH; }'\n",
            "project/src/training/main.py": PROBE,
        }
    },
    "k01-conda-and-settings": {
        "files": {"settings.sh": 'export DATA_ROOT=/data\nconda() { export PATH="$CONDA_ROOT/envs/$2/bin:$PATH"; }\n'}
    },
    "k03-tasks-as-cores": {"ranks": False},
    "k04-array": {"ranks": False},
    "k09-here-string": {"environ": {"LIST": "one two  three"}},
    "k11-chdir": {"files": {"project/here": ""}},
    "k12-setup-before-console-script": {
        "files": {"bin/llamafactory-cli": "#!/usr/bin/env python\nimport train\ntrain.main()\n"},
        "environ": {"PYTHONPATH": "."},
    },
    "k16-singularity-run": {
        "files": {
            "bin/singularity": '#!/bin/sh\n# A fake: what a runscript does.\nshift 3\nFROM_RUNSCRIPT=1 exec "$@"\n'
        }
    },
    "k17-unset": {"environ": {"PYTHONPATH": "/nowhere", "OTHER": "stays"}},
    "k20-stdin-of-python": {"files": {"cfg.txt": "lr: 1\nb: 2"}},
    "k23-expansions": {"args": ("a b", "", "--lr=0.1", "ü*?", "-x")},
    "k24-singularity-exec": {
        "files": {
            "bin/singularity": '#!/bin/sh\n# A fake.\nshift 7\nA=1 exec "$@"\n',
            "env.sh": "export FROM_OVERLAY=yes\n",
        }
    },
    "k25-accelerate-config": {
        "files": {
            "cpu.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_machines: 1\n"
            "use_cpu: false\nmixed_precision: 'no'\n"
            "main_training_function: main\nrdzv_backend: static\nsame_network: true\n"
        }
    },
    "k26-setup-on-the-node": {"files": {"cfg.txt": "copied\n"}},
    "k27-noise": {"environ": {"BASH_FUNC_module%%": '() {  echo "module $*" >&2\n}'}},
    "k29-option-of-a-plugin-that-is-not-here": {"ranks": False, "state": "FAILED"},
    "k31-sbatch-in-a-script": {"ranks": False, "plain": False},
    "k31-nested-script": {"files": {"launch.sh": 'srun python train.py "$@"\n'}},
    "srun-chdir": {"files": {"sub/here": ""}},
    "srun-python-m": {"environ": {"PYTHONPATH": "."}},
    "srun-wrapper-script": {"files": {"wrap.sh": '#!/bin/bash\nexport WRAPPED=$SLURM_PROCID\nexec "$@"\n'}},
    "srun-multi-prog": {
        "files": {"progs.conf": "0 python train.py zero\n1-3 python train.py rest %t %o\n"},
        "ranks": False,
    },
    "srun-het-group": {"ranks": False},
    "srun-no-program": {"ranks": False},
    "srun-of-plain-programs": {"files": {"cfg.txt": "x\n"}, "ranks": False},
    "srun-by-path": {"ranks": False},
    "srun-affinity": {"confined": True},
    "srun-affinity-of-two-cores": {"confined": True},
    "torchrun-no-python": {"files": {"wrap.sh": '#!/bin/bash\nWRAPPED=1 exec python "$@"\n'}},
    "torchrun-in-srun-c10d": {"racy": True},
    "torchrun-module-in-srun": {"racy": True},
    "torchrun-restarts": {"racy": True},
    "torchrun-usage-error": {"ranks": False},
    "torch-launch-module": {"ranks": False},
    "strict-mode-fails": {"state": "FAILED"},
    "subshells-and-groups": {"files": {"sub/here": ""}},
    "trap-of-usr1": {"state": "FAILED"},
    "trap-on-exit": {"state": "FAILED"},
    "zero-and-arguments": {"args": ("first", "a b", "c=d", "--", "-- e", "slurm.nodes=9")},
    "umask-and-cd": {"files": {"sub/here": ""}},
    "sh": {"state": "FAILED"},
    "bash-with-options": {"state": "FAILED"},
    "python-script": {"args": ("x y",)},
    "crlf": {"text": "#!/bin/bash\r\n#SBATCH -n2\r\nsrun python train.py\r\n", "state": "refused"},
    "no-first-line": {
        "text": "# no line that names a shell\n#SBATCH -n2\nsrun python train.py\n",
        "file": "none.slurm",
        "state": "refused",
    },
    "bad-option": {"state": "refused"},
    "unknown-partition": {"state": "refused"},
    "bytes": {
        "text": "#!/bin/bash\n#SBATCH -n1\n# caf\udce9 \xfc\nX=$'\\xe9'\nsrun python train.py \xfc\u4e2d \"$X\"\n"
    },
    "modules-and-backquotes": {
        "files": {"src/training/main.py": PROBE},
        "environ": {"BASH_FUNC_module%%": '() {  echo "module $*" >&2\n}'},
    },
    "nodes-in-an-array": {
        "args": ("--steps", "10"),
        "files": {"project/train.py": PROBE},
        "environ": {"CONFIG": "large"},
        "racy": True,
        "state": "FAILED",
    },
    "path-with-spaces": {
        "files": {"sub dir/run me.sh": 'python "my train.py" "$1"\n', "my train.py": PROBE},
        "file": "sub dir/träin it's.slurm",
    },
    "options-on-the-line": {
        "options": ("nodes=2", "ntasks=4", "job-name=line", "output=line-%j.txt", "export=ALL,FROM_LINE=1")
    },
    "export-none": {"environ": {"MINE": "1"}},
    "export-some": {"environ": {"MINE": "1", "OTHER": "2"}},
    "variables-of-sbatch": {"environ": {"SBATCH_JOB_NAME": "variable", "SRUN_CPUS_PER_TASK": "1"}},
    "bash-env-of-the-user": {
        "files": {"env of mine.sh": "SET_BY_BASH_ENV=yes\n"},
        "environ": {"BASH_ENV": "./env of mine.sh"},
    },
    "python-of-the-script-itself": {"ranks": False},
    "exit-3": {"state": "FAILED"},
    "last-step-fails": {"state": "FAILED"},
    "script-killed-by-9": {"state": "FAILED"},
    "script-killed-by-15": {"state": "FAILED"},
    "rank-killed-among-others": {"racy": True},
    "ranks-killed": {"racy": True},
    "rank-raises": {"racy": True},
}


_PLACES = "Slurm fills the first node as far as it has cores; here tasks are spread evenly"
NEEDS_SLURM = {
    "bad-option": "sbatch refuses the script; the plan names the line",
    "export-none": "with --export=NONE a job of Slurm has the variables of a login",
    "highest-exit-code": "ranks end others: the busier the machine, the more of them before they can fail",
    "unknown-partition": "there is no partition that could be unknown",
    "variables-of-sbatch": "SBATCH_* are variables of sbatch",
    "k29-option-of-a-plugin-that-is-not-here": "srun refuses it; here the program runs in no container, and it is said",
    "k31-sbatch-in-a-script": "nothing is queued, and it is said",
    "requeue-in-the-script": "nothing is queued again, and it is said",
    "srun-affinity": "nothing binds ranks to cores",
    "srun-affinity-of-two-cores": "nothing binds ranks to cores",
    "srun-by-path": "it calls the real srun of this machine",
    "srun-het-group": "the stand-in for srun takes one program, and says so",
    "srun-multi-prog": "the stand-in for srun takes one program, and says so",
    "signal-to-steps": "no time limit is near",
    "trap-of-usr1": "no time limit is near",
    "options-on-the-line": _PLACES,
    "srun-short-options": _PLACES,
}
"""Scripts that are not the same without Slurm, and why."""


def all_scripts() -> list[Script]:
    """List the scripts, by name."""
    texts = {path.stem: path.read_text() for path in _FOLDER.glob("*.slurm")}
    special = {name: {"text": texts.get(name), **more} for name, more in _SPECIAL.items()}
    named = {name: {"text": text} for name, text in texts.items()} | special
    return [Script(name=name, **named[name]) for name in sorted(named)]
