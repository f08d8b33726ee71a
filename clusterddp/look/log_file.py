"""One log file as bytes: read while it grows, from its last lines on, or only its last lines."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from clusterddp.look.printable import printable

PIECE_BYTES = 64 * 1024
"""A longer line is returned in pieces, so that no line is too long for memory."""
TURN_BYTES = 16 * PIECE_BYTES
"""How much of one file is read before the next one is."""


class LogFile:
    """One growing file, read from a position onwards; it is open only while it is read."""

    def __init__(self, path: Path, *, tail_lines: int | None = None, start: int = 0) -> None:
        """Read from the line on that has the byte at `start`, of it and what follows at most the last `tail_lines`."""
        self.path = path
        self._position = _position_of_line(path, start) if start else 0
        if tail_lines is not None:
            self._position = max(self._position, position_of_last_lines(path, tail_lines))
        self.end = self._position
        """Where the piece ends that was yielded last."""
        self._begun = b""  # the beginning of a line whose end has not been written yet
        self._inode: int | None = None

    def read(self, turn_bytes: int = TURN_BYTES) -> Iterator[bytes]:
        """Yield the lines that were finished since the last call; about `turn_bytes` a call at most.

        A carriage return ends a line too: progress bars write nothing else for minutes.
        """
        try:
            found = os.stat(self.path)
            size, inode, self._inode = found.st_size, self._inode, found.st_ino
            if size < self._position or inode not in {None, found.st_ino}:  # emptied, or another one: begin anew
                self._position, self.end, self._begun = 0, 0, b""
            if size == self._position:
                return
            with open(self.path, "rb") as file:
                file.seek(self._position)
                for _ in range(turn_bytes // PIECE_BYTES):
                    if not (block := file.read(PIECE_BYTES)):
                        return
                    self._position += len(block)
                    yield from self._split(block)
        except FileNotFoundError:
            return

    def read_all(self) -> Iterator[bytes]:
        """Yield the whole content, with an unfinished last line."""
        while True:
            position = self._position
            yield from self.read()
            if self._position == position:
                break
        if self._begun:
            begun, self._begun = self._begun, b""
            self.end += len(begun)
            yield begun

    def _split(self, block: bytes) -> Iterator[bytes]:
        *lines, last = (self._begun + block).splitlines(keepends=True)
        if last.endswith(b"\n"):
            lines.append(last)
            last = b""
        elif len(last) >= PIECE_BYTES:
            cut = _character_boundary(last)
            lines.append(last[:cut])
            last = last[cut:]
        self._begun = last
        for line in lines:
            self.end += len(line)
            yield line


def position_of_last_lines(path: Path, count: int) -> int:
    """Find where the last `count` lines of a file begin, reading backwards from its end; 0 when it has no more."""
    try:
        with open(path, "rb") as file:
            position = size = file.seek(0, os.SEEK_END)
            if count <= 0:
                return size
            while position > 0:
                block_bytes = min(PIECE_BYTES, position)
                position -= block_bytes
                file.seek(position)
                block = file.read(block_bytes)
                end = len(block)
                if position + end == size and block.endswith(b"\n"):
                    end -= 1  # this one ends the last line, it begins none
                while (end := block.rfind(b"\n", 0, end)) >= 0:
                    count -= 1
                    if count == 0:
                        return position + end + 1
    except FileNotFoundError:
        pass
    return 0


def _position_of_line(path: Path, offset: int) -> int:
    """Find where the line begins that has the byte at `offset`; the end of a file that is shorter."""
    try:
        with open(path, "rb") as file:
            position = offset = min(offset, file.seek(0, os.SEEK_END))
            while position > 0:
                block_bytes = min(PIECE_BYTES, position)
                position -= block_bytes
                file.seek(position)
                block = file.read(block_bytes)
                if (end := max(block.rfind(b"\n"), block.rfind(b"\r"))) >= 0:
                    return position + end + 1
    except FileNotFoundError:
        pass
    return 0


def read_log_tail(path: Path, *, max_lines: int = 10, max_columns: int = 200) -> list[str]:
    """Read the last lines of a log that are not empty, escaped for a terminal; none when there is no such file."""
    try:
        # A link, or a pipe without a writer, may lie where another user can write.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return []
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 16 * 1024))
            lines = file.read(16 * 1024).splitlines()
    except OSError:
        return []
    kept = [printable(line.rstrip()) for line in lines if line.strip()][-max_lines:]
    return [line if len(line) <= max_columns else line[: max_columns - 3] + "..." for line in kept]


def _character_boundary(data: bytes) -> int:
    """Find a place near the end of `data` where no UTF-8 character is cut."""
    for cut in range(len(data) - 1, max(0, len(data) - 4), -1):
        if data[cut] & 0xC0 != 0x80:
            return cut
    return len(data)
