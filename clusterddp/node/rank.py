"""The start-up of a rank: `python -m clusterddp.node.rank RUN_DIR` becomes the run's entry.

With `--fork` before RUN_DIR it is the fork server of a node (fork_server.py), and the ranks are its children.

It ties the rank's life to its supervisor, makes the stop signals create the stop file, and runs the entry in this
process (a command as its child). An exception is left in TORCHELASTIC_ERROR_FILE, in torchelastic's own form. What is
not in the environment is not done, so whoever sets RANK and the like (Slurm's srun) may start it too.

It imports next to nothing: sixteen of these start at once on two cores.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import importlib
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from clusterddp.node import entry
from clusterddp.node.entry import run_entry
from clusterddp.node.stack_hook import answer_stack_requests

ENDING = "ENDING"
"""The file beside the stop file that tells a rank what SIGTERM means: it is there when the gang is being ended."""
_PORT_LISTENS = (
    "hint: at MASTER_PORT a socket of the run listens already, which torch's store takes over; "
    "a program that binds the port itself is to be an entry.command (docs/entry.md)\n"
)
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Be a rank, or fork those of a node."""
    run_dir = sys.argv[-1]
    if sys.argv[1] == "--fork":
        from clusterddp.node.fork_server import serve

        serve(lambda: run_rank(run_dir))
    else:
        run_rank(run_dir)


def run_rank(run_dir: str) -> None:
    """Run the entry; the exit code is the entry's own, 1 after an exception."""
    _die_with_supervisor()
    _stop_on_signal()
    _keep_flight_record()
    _keep_to_cores()
    if "CLUSTERDDP_LISTENER_FD" in os.environ:
        from clusterddp.node.store_listener import give_listener_to_torch

        give_listener_to_torch()
    with contextlib.suppress(RuntimeError, OSError):  # standard error may be closed
        faulthandler.enable()
    answer_stack_requests()
    try:
        run_entry(run_dir)
    except SystemExit as left:
        if isinstance(left.code, str):
            _write_error_file(f"SystemExit: {left.code}", "")
        _record_end(left.code if isinstance(left.code, int) else int(left.code is not None), str(left.code))
        raise
    except BaseException as error:
        _fail(error)
    else:
        _record_end(0)
    finally:
        _drop_unwritten_output()
        _ignore_late_signals()
        if "torch.distributed" in sys.modules:
            from clusterddp.network.gloo import await_gloo_threads

            await_gloo_threads()


def _die_with_supervisor() -> None:
    """Have the kernel kill this process when the supervisor ends (Linux; elsewhere the guard's sweep must do)."""
    expected = os.environ.pop("CLUSTERDDP_SUPERVISOR_PID", None)
    if expected is None:
        return
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The supervisor may have died before the call; its death is then never reported.
    if os.getppid() != int(expected):
        os.kill(os.getpid(), signal.SIGKILL)


def _stop_on_signal() -> None:
    """Make USR2 and TERM ask the whole gang to stop (the stop contract); TERM from a gang's end just ends us."""
    path = os.environ.get("CLUSTERDDP_STOP_FILE")
    if path is None:
        return
    from clusterddp.run.stop import request_stop
    from clusterddp.system.files import is_file

    stop_file = Path(path)
    rank = os.environ.get("RANK", "?")

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and is_file(stop_file.with_name(ENDING)):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        # A full disk must not become an exception in the middle of the user's program.
        with contextlib.suppress(OSError):
            request_stop(stop_file, f"{signal.Signals(number).name} to rank {rank}")

    signal.signal(signal.SIGUSR2, handle)
    signal.signal(signal.SIGTERM, handle)


def _keep_flight_record() -> None:
    """Have torch record collectives; with NCCL, write which of them this rank waited for when one times out.

    Source: FlightRecorder.hpp and ProcessGroupNCCL.hpp of torch 2.13; the second names are those of earlier versions.
    """
    stop_file = os.environ.get("CLUSTERDDP_STOP_FILE")
    if stop_file is None:
        return
    on_nccl = os.environ.get("CLUSTERDDP_BACKEND") == "nccl"
    dumps = f"{Path(stop_file).parent}/logs/nccl_trace_"
    variables: list[tuple[tuple[str, ...], str]] = [
        (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000" if on_nccl else "100")
    ]
    if on_nccl:
        variables.append((("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"))
        variables.append((("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), dumps))
    for names, value in variables:
        if os.environ.keys().isdisjoint(names):
            os.environ[names[0]] = value


def _keep_to_cores() -> None:
    """Keep to the cores near the rank's GPU, and with it all that the program starts."""
    text = os.environ.pop("CLUSTERDDP_CORES", None)
    if text is None:
        return
    from clusterddp.system.gpu_cores import read_cores

    with contextlib.suppress(OSError, ValueError, AttributeError):  # a core went offline meanwhile; no Linux
        os.sched_setaffinity(0, read_cores(text))


def _ignore_late_signals() -> None:
    """Let no stop signal end a program that is through: Python gives handlers back before it exits.

    Slurm's SIGTERM may come when another host's has already stopped everybody.
    """
    if "CLUSTERDDP_STOP_FILE" in os.environ:
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _drop_unwritten_output() -> None:
    """Drop what a full disk did not take of a log, else Python ends a program that is through with exit code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _fail(error: BaseException) -> NoReturn:
    """Report the exception and leave at once: threads of a broken collective would hold up an orderly exit."""
    import traceback

    told = "".join(traceback.format_exception(type(error), error, _own_frames(error.__traceback__)))
    if getattr(error, "errno", None) == errno.EADDRINUSE and "clusterddp.node.store_listener" in sys.modules:
        told += _PORT_LISTENS
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(told)
    words = "".join(traceback.format_exception_only(type(error), error)).strip()
    _write_error_file(words, told)
    _record_end(1, words, told)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(1)


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Leave out our own frames and runpy's: people look for theirs."""
    step = trace
    ours = {__file__, entry.__file__, runpy.__file__, "<frozen runpy>", importlib.__file__}
    while step is not None and _is_ours(step.tb_frame.f_code.co_filename, ours):
        step = step.tb_next
    return step or trace


def _is_ours(file: str, ours: set[str]) -> bool:
    return file in ours or file.startswith("<frozen importlib.")


def _write_error_file(words: str, told: str) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    now = time.time_ns()
    extra = {"py_callstack": told, "timestamp": str(now // 10**9), "timestamp_ns": now}
    # torch's @record may have written the same exception already.
    with contextlib.suppress(OSError), open(path, "x", encoding="utf-8", errors="backslashreplace") as file:
        json.dump({"message": {"message": words, "extraInfo": extra}}, file)


def _record_end(exit_code: int, error: str = "", told: str = "") -> None:
    """Record this rank's own end where no supervisor does."""
    if "CLUSTERDDP_ALONE" in os.environ:
        from clusterddp.node.unsupervised import record_end

        record_end(exit_code, error, told)


if __name__ == "__main__":
    main()
