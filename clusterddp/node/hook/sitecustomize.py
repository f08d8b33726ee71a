"""In the PYTHONPATH of the ranks of a batch script: lets the supervisor ask a rank where it is, and why it ends.

Any Python from 3.7 imports it at its start, with or without clusterddp installed. The user's own sitecustomize, which
it hides, is imported as if this one were not there. The first Python of a rank answers; what that starts does not.
"""

import os
import sys
from typing import Any


def _import_hidden() -> None:
    import importlib

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    own = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if getattr(error, "name", None) != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = own


def _record_exception(path: str, hook: Any) -> Any:
    """Write the exception that ends the rank where its supervisor looks for it, in torchelastic's form."""

    def record(kind: Any, error: Any, trace: Any) -> None:
        hook(kind, error, trace)
        try:
            import json
            import time
            import traceback

            message = "".join(traceback.format_exception_only(kind, error)).strip()
            frames = "".join(traceback.format_exception(kind, error, trace))
            extra = {"py_callstack": frames, "timestamp": str(int(time.time()))}
            with open(path, "x") as file:
                json.dump({"message": {"message": message, "extraInfo": extra}}, file)
        except Exception:  # noqa: S110  the full disk, for one; standard error has it, too
            pass

    return record


def _answer() -> None:
    if os.environ.get("CLUSTERDDP_HOOKED") or "RANK" not in os.environ or "CLUSTERDDP_STEP" not in os.environ:
        return
    import importlib.util

    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "stack_hook.py")
    spec = importlib.util.spec_from_file_location("_clusterddp_stack_hook", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    os.environ["CLUSTERDDP_HOOKED"] = str(os.getpid())
    if not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & set(os.environ):
        os.environ["TORCH_FR_BUFFER_SIZE"] = "200"  # torch then records how far its collectives are
    module.answer_stack_requests()
    if "CLUSTERDDP_STOP_FILE" in os.environ:
        ranks = os.path.join(os.path.dirname(os.environ["CLUSTERDDP_STOP_FILE"]), "ranks")
        file = os.path.join(ranks, "%03d.error.json" % int(os.environ["RANK"]))
        sys.excepthook = _record_exception(file, sys.excepthook)


try:
    _answer()
except Exception as error:
    sys.stderr.write(f"clusterddp: this rank cannot be asked for its stack: {error!r}\n")
_import_hidden()
