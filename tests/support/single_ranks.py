"""Ranks that a test starts itself, without a supervisor."""

from __future__ import annotations

import json
import os
import subprocess

from clusterddp.system.python import module_command


def start_rank(run_dir, entry, **environment):
    run_dir.mkdir(exist_ok=True)
    base = {"kind": "script", "target": "", "args": [], "working_dir": str(run_dir), "import_paths": []}
    (run_dir / "plan.json").write_text(json.dumps({"gang": {"entry": base | entry}}))
    return subprocess.Popen(
        module_command("clusterddp.node.rank", str(run_dir)),
        env=dict(os.environ) | environment,
        cwd=run_dir,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_rank(run_dir, entry, **environment):
    process = start_rank(run_dir, entry, **environment)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def write_script(tmp_path, text, name="train.py"):
    script = tmp_path / "src" / name
    script.parent.mkdir(exist_ok=True)
    script.write_text(text)
    return script
