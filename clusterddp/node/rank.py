"""The start-up of a rank: `python -m clusterddp.node.rank RUN_DIR` becomes the run's entry.

With `--fork` before RUN_DIR it is the fork server of a node (fork_server.py), and the ranks are its children.

The rank dies with its supervisor, its stop signals create the stop file, and the entry runs in this process (a command
as its child). An exception is written to TORCHELASTIC_ERROR_FILE, in torchelastic's own form. Each of these needs its
variable in the environment, so another launcher that sets RANK and the like may start a rank, too.

It imports next to nothing: sixteen of these start at once on two cores.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
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
from clusterddp.node.entry import import_first, run_entry
from clusterddp.node.stack_hook import answer_stack_requests
from clusterddp.system.processes import die_with_parent

ENDING = "ENDING"
"""The file beside the stop file that exists while the gang is being ended: SIGTERM then ends a rank."""
_PORT_LISTENS = (
    "hint: a socket of the run already listens at MASTER_PORT, and torch's store takes it over; "
    "a program that binds the port itself has to be an entry.command (docs/entry.md)\n"
)


def main() -> None:
    """Run a rank, or fork the ranks of a node."""
    run_dir = sys.argv[-1]
    if sys.argv[1] == "--fork":
        from clusterddp.node.fork_server import serve

        serve(lambda: run_rank(run_dir))
    else:
        run_rank(run_dir)


def run_rank(run_dir: str) -> None:
    """Run the entry; the exit code is the entry's own, or 1 after an exception."""
    _die_with_supervisor()
    _stop_on_signal()
    _keep_flight_record()
    _import_first()
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
        drop_unwritten_output()
        if "CLUSTERDDP_STOP_FILE" in os.environ:
            # Python resets its handlers before it exits. A batch system's SIGTERM on this host may come after the gang
            # has stopped because of another host's.
            for number in (signal.SIGUSR2, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        if "torch.distributed" in sys.modules:
            from clusterddp.network.gloo import await_gloo_threads

            await_gloo_threads()


def _die_with_supervisor() -> None:
    """Have the kernel kill this process when the supervisor ends."""
    expected = os.environ.pop("CLUSTERDDP_SUPERVISOR_PID", None)
    if expected is not None:
        die_with_parent(int(expected))


def _stop_on_signal() -> None:
    """Make USR2 and TERM ask the gang to stop (the stop contract); while the gang is ended TERM ends this rank."""
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
    """Let torch record collectives, and write NCCL's that this rank waited for beside its log when one times out.

    Source: FlightRecorder.hpp and ProcessGroupNCCL.hpp of torch 2.13; the second names are those of earlier versions.
    """
    stop_file = os.environ.get("CLUSTERDDP_STOP_FILE")
    if stop_file is None:
        return
    on_nccl = os.environ.get("CLUSTERDDP_BACKEND") == "nccl"
    dumps = f"{Path(stop_file).parent}/logs/nccl_trace_"
    variables: list[tuple[tuple[str, ...], str]] = [
        (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000" if on_nccl else "200")
    ]
    if on_nccl:
        variables.append((("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"))
        variables.append((("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), dumps))
    for names, value in variables:
        if os.environ.keys().isdisjoint(names):
            os.environ[names[0]] = value


def _import_first() -> None:
    """Import what the entry imports, without the garbage collector: see `import_first`."""
    text = os.environ.pop("CLUSTERDDP_PRELOAD", None)
    if text is None:
        return
    try:
        import_first(text.split(","))
    except (Exception, SystemExit):
        # The entry's own import reports it, in a new process: torch cannot be imported twice.
        os.execv(sys.executable, sys.orig_argv)  # the same process
    gc.enable()


def drop_unwritten_output() -> None:
    """Drop output that a full disk did not take; Python would end with exit code 120 because of it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _fail(error: BaseException) -> NoReturn:
    """Report the exception and exit at once: threads of a broken collective would block an orderly exit."""
    import traceback

    trace = "".join(traceback.format_exception(type(error), error, _own_frames(error.__traceback__)))
    if getattr(error, "errno", None) == errno.EADDRINUSE and "clusterddp.node.store_listener" in sys.modules:
        trace += _PORT_LISTENS
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(trace)
    message = "".join(traceback.format_exception_only(type(error), error)).strip()
    _write_error_file(message, trace)
    _record_end(1, message, trace)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(1)


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Drop our own frames and runpy's at the top: users look for theirs."""
    step = trace
    ours = {__file__, entry.__file__, runpy.__file__, "<frozen runpy>", importlib.__file__}
    while step is not None and _is_ours(step.tb_frame.f_code.co_filename, ours):
        step = step.tb_next
    return step or trace


def _is_ours(file: str, ours: set[str]) -> bool:
    return file in ours or file.startswith("<frozen importlib.")


def _write_error_file(message: str, trace: str) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    now = time.time_ns()
    extra = {"py_callstack": trace, "timestamp": str(now // 10**9), "timestamp_ns": now}
    # torch's @record may have written the same exception already.
    with contextlib.suppress(OSError), open(path, "x", encoding="utf-8", errors="backslashreplace") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)


def _record_end(exit_code: int, error: str = "", trace: str = "") -> None:
    """Record this rank's end where no supervisor does; a rank that is killed records nothing, nor does its fork."""
    if "CLUSTERDDP_ALONE" not in os.environ:
        return
    from clusterddp.errors import ClusterddpError
    from clusterddp.run.directory import RunDir
    from clusterddp.run.record import RankEnd, read_rank, write_rank
    from clusterddp.system.files import write_json

    with contextlib.suppress(OSError, KeyError, ValueError, ClusterddpError):
        attempt = RunDir(Path(os.environ["CLUSTERDDP_RUN_DIR"])).attempt(int(os.environ["CLUSTERDDP_ATTEMPT"]))
        record = read_rank(attempt, int(os.environ["RANK"]))
        if record is None or record.pid != os.getpid():
            return
        message = " ".join(error.split())[:400] if exit_code else ""
        if trace:  # torchrun has named another file for it
            extra = {"py_callstack": trace, "timestamp": str(int(time.time()))}
            content = {"message": {"message": message, "extraInfo": extra}}
            write_json(attempt.error_file(record.rank), content, exclusive=True)
        end = RankEnd(rank=record.rank, host=record.host, exit_code=exit_code, error=message)
        write_rank(attempt, record.at_end(end))


if __name__ == "__main__":
    main()
