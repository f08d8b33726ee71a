"""A notebook that submits functions, run by nbclient: `python notebook.py LAUNCHER` prints what cells gave, as JSON.

A cell gives the text of its result, `html: ...` where it has one for a browser, or `error: NAME: text`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

CELLS = (
    """
import clusterddp
scale = 10
executor = clusterddp.Executor("LAUNCHER", device="cpu", parallel=2, resources={"time": "0:10:00"}, runs_dir="runs")
def train(lr, seed=0):
    if lr > 1:
        raise ValueError(f"{lr} diverges")
    return lr * scale + seed
""",
    "def outer(word):\n    return lambda: (word, train(0.5))\nexecutor.submit(outer('closure')).result()",
    "runs = executor.map(train, [0.1, 0.2], [1, 2])\n[run.result() for run in runs]",
    "runs[1]",
    "executor.submit(train, 2).result()",
)


def run_notebook(launcher: str) -> list[str]:
    """Run the cells in a kernel of this Python, in this directory."""
    import nbformat
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    cells = [nbformat.v4.new_code_cell(cell.replace("LAUNCHER", launcher)) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    manager = AsyncKernelManager(transport="ipc")
    NotebookClient(
        notebook, km=manager, timeout=240, allow_errors=True, resources={"metadata": {"path": "."}}
    ).execute()
    return [_given(cell.outputs) for cell in notebook.cells]


def check_outcomes(given: list[str]) -> None:
    """Check what the cells of `CELLS` gave."""
    assert given[:3] == ["", "('closure', 5.0)", "[2.0, 4.0]"]
    assert given[3].startswith("html: <table><tr><th>run</th><td>")
    assert "<td>COMPLETED" in given[3]
    assert given[4].startswith("error: RankError: ")
    lines = given[4].splitlines()
    assert "rank 0 on " in lines[0]
    assert any(line.strip().endswith(", in train") for line in lines)
    assert lines[-1] == "ValueError: 2 diverges"


def _given(outputs: list[Any]) -> str:
    for output in outputs:
        if output.output_type == "error":
            return f"error: {output.ename}: {output.evalue}"
        if output.output_type == "execute_result":
            page = output.data.get("text/html")
            return f"html: {page}" if page else str(output.data["text/plain"])
    return ""


if __name__ == "__main__":
    print(json.dumps(run_notebook(sys.argv[1])))
