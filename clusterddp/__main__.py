"""The command `clusterddp`, also as `python -m clusterddp`: what its process needs before anything is imported."""

from __future__ import annotations

import gc
import re
import signal
import sys
import time
from types import FrameType

_HOLDS = re.compile(r"^<frozen importlib\.|/pydantic/")
"""Files whose functions an interrupt would break."""
_RETRY_S = 0.02
_LONGEST_S = 2.0


class _Interrupt:
    """Ctrl-C raises KeyboardInterrupt, but not inside of an import or of pydantic: it waits for their end, at most 2 s.

    Code that makes classes and pydantic turn the exception into errors of their own, and callbacks of the import system
    drop it: the command would report a bug, or go on and start what the user did not want any more.
    """

    def __init__(self) -> None:
        self._since: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT, and SIGALRM, which asks again."""
        if number == signal.SIGALRM and self._since is None:  # the interrupt has been raised
            return
        now = time.monotonic()
        self._since = self._since or now
        if _is_held(frame) and now - self._since < _LONGEST_S:
            signal.setitimer(signal.ITIMER_REAL, _RETRY_S)
            return
        self._since = None
        raise KeyboardInterrupt


def _is_held(frame: FrameType | None) -> bool:
    while frame is not None:
        if _HOLDS.search(frame.f_code.co_filename):
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
