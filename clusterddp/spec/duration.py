"""Time limits in Slurm's notation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from clusterddp.spec.scalars import problem, read_text, refuse
from clusterddp.spec.tree import Scalar
from clusterddp.system.units import UNIT_S

TIME = r"^([0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2})$"
MAX_DAYS = 3650
DAY_S = 86_400

_HINT = 'write "H:M:S", "D-H:M:S", "M:S", "D-H", "D-H:M" or minutes'
_WITH_UNIT = re.compile(r"([0-9]{1,9}) ?(s|m|min|h|d)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Duration:
    """A length of time as Slurm writes it: the text as given, and what it means in seconds."""

    text: str
    seconds: int

    def __str__(self) -> str:
        return self.text


def read_duration(value: object) -> Duration:
    """Read a time limit in one of Slurm's six forms; a bare number is minutes.

    Source: sbatch(1), option --time.
    """
    if isinstance(value, Duration):
        return value
    if isinstance(value, bool) or not isinstance(value, Scalar | str | int):
        refuse(value, "a time", _HINT)
    text = str(value) if isinstance(value, int) else read_text(value)
    if text.lower() in {"infinite", "unlimited"}:
        refuse(value, "a time", "leave time out for no limit of your own")
    if not re.fullmatch(TIME, text) or len(text) > 20:
        refuse(value, "a time", _hint_at(text))
    seconds = _duration_seconds(text, value)
    if text.isdecimal() and seconds > DAY_S:
        _refuse_minutes(text)
    if not 0 < seconds <= MAX_DAYS * DAY_S:
        hint = None if seconds else "leave time out for no limit of your own"
        refuse(value, f"a time above 0 and up to {MAX_DAYS} days", hint)
    return Duration(text, seconds)


def _hint_at(text: str) -> str:
    """Spell a time with a unit, such as 20s or 2h, in Slurm's notation; of another text, name the forms."""
    found = _WITH_UNIT.fullmatch(text)
    if found is None:
        return _HINT
    seconds = int(found[1]) * UNIT_S[found[2][0].lower()]
    days, clock = divmod(seconds, DAY_S)
    written = f"{clock // 3600}:{clock // 60 % 60:02}:{clock % 60:02}"
    return f'{text} is "{days}-{written}"' if days else f'{text} is "{written}"'


def _refuse_minutes(text: str) -> NoReturn:
    """Refuse a bare number that is unlikely to mean minutes."""
    minutes = int(text)
    hint = f'if you mean that, write "{minutes // 1440}-{minutes % 1440 // 60:02}:{minutes % 60:02}"'
    if minutes % 60 == 0:
        hours, rest = divmod(minutes, 3600)
        hint = f'{minutes} seconds are "{hours}:{rest // 60:02}:00"; ' + hint
    raise problem(f"{text} means {text} minutes ({minutes / 1440:.3g} days), as in Slurm", hint)


def _duration_seconds(text: str, value: object) -> int:
    days, _, clock = text.rpartition("-")
    fields = [int(part) for part in clock.split(":")]
    if any(part > 59 for part in fields[1:]) or (days and fields[0] > 23):
        refuse(value, "minutes and seconds up to 59, and hours up to 23 behind days", _HINT)
    if days:
        hours, minutes, seconds = [*fields, 0, 0][:3]
    elif len(fields) == 1:
        hours, minutes, seconds = 0, fields[0], 0
    else:
        hours, minutes, seconds = [0, *fields][-3:]
    return int(days or 0) * DAY_S + hours * 3600 + minutes * 60 + seconds
