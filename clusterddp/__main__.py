"""The command `clusterddp`, also as `python -m clusterddp`: what its process needs before anything is imported."""

from __future__ import annotations

import gc
import re
import signal
import sys
import time
from types import FrameType

_NOT_INSIDE = re.compile(r"^<frozen importlib\.|/(site|dist)-packages/pydantic/")
"""The files of functions that KeyboardInterrupt would break."""
_RETRY_S = 0.02
_LONGEST_S = 2.0


class _Interrupt:
    """Ctrl-C raises KeyboardInterrupt, but inside of an import or of pydantic only at its end, or after 2 s.

    Code that makes classes and pydantic turn the exception into errors of their own, and callbacks of the import system
    drop it: the command would report a bug, or go on and start what the user did not want any more.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        """When the interrupt that waits came, in seconds of the monotonic clock."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT, and SIGALRM, by which an interrupt that waits is tried again."""
        if number == signal.SIGALRM and self._since is None:  # it has been raised
            return
        now = time.monotonic()
        self._since = self._since or now
        if _must_wait(frame) and now - self._since < _LONGEST_S:
            signal.setitimer(signal.ITIMER_REAL, _RETRY_S)
            return
        self._since = None
        raise KeyboardInterrupt


def _must_wait(frame: FrameType | None) -> bool:
    while frame is not None:
        if _NOT_INSIDE.search(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def start() -> int:
    """Run the command line as the whole of this process; return the exit code.

    The imports make objects that live to the end. The garbage collector would visit them again and again, which takes
    a tenth of the processor time of a short command.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup and a shell's & ignore it
        interrupt = _Interrupt()
        for number in (signal.SIGALRM, signal.SIGINT):
            signal.signal(number, interrupt)
    gc.set_threshold(50_000)
    try:
        from clusterddp.cli.main import main

        exit_code = main()
    except KeyboardInterrupt:  # before the command has begun, or after its end
        return 130
    gc.freeze()
    return exit_code


if __name__ == "__main__":
    sys.exit(start())
