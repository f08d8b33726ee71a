"""The values of a script's words, as far as the script itself sets them; the rest is kept as written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from clusterddp.errors import UsageError
from clusterddp.importing.shell import Piece, Word

PLACEHOLDERS = {
    "SLURM_PROCID": "rank", "RANK": "rank", "OMPI_COMM_WORLD_RANK": "rank", "PMI_RANK": "rank",
    "SLURM_LOCALID": "local_rank", "LOCAL_RANK": "local_rank", "OMPI_COMM_WORLD_LOCAL_RANK": "local_rank",
    "SLURM_NODEID": "node_rank", "NODE_RANK": "node_rank", "GROUP_RANK": "node_rank",
    "SLURM_NNODES": "num_nodes", "SLURM_JOB_NUM_NODES": "num_nodes",
    "WORLD_SIZE": "world_size", "OMPI_COMM_WORLD_SIZE": "world_size", "PMI_SIZE": "world_size",
    "MASTER_ADDR": "master_addr", "MASTER_PORT": "master_port",
}  # fmt: skip
"""Variables that locate a rank -> the placeholder for them in the arguments of an entry."""
_MARK = "\0"
"""Around the name of a placeholder in a text; no accepted file has this character."""
MAX_EXPANSION = 5_000_000
"""Most characters of all values of a script's variables: `v1=$v0$v0...` makes any number from a few lines."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text, and the parts of it that only a shell could compute, which are in it as written."""

    text: str
    unknown: tuple[str, ...] = ()


@dataclass(slots=True)
class Variables:
    """The variables of a script, as far as they can be evaluated without a shell."""

    given: Mapping[str, str] = field(default_factory=dict)
    """Variables that Slurm would set, by the options of the job."""
    values: dict[str, tuple[Text, ...]] = field(default_factory=dict)
    """Variables that the script has set; an array has several values, or none."""
    used: set[str] = field(default_factory=set)
    defaults: dict[str, str] = field(default_factory=dict)
    """Each `${NAME:-default}` whose NAME the script does not set: as written -> the default."""
    _spent: int = 0

    def spend(self, characters: int) -> None:
        """Count characters of the script's variables.

        Raises: UsageError: there are too many.
        """
        self._spent += characters
        if self._spent > MAX_EXPANSION:
            raise UsageError(
                f"the values of the script's variables have more than {MAX_EXPANSION:,} characters",
                hint="a variable that repeats itself again and again is no setting: write the spec by hand",
            )

    def assign(self, word: Word) -> tuple[str, Text] | None:
        """Carry out `NAME=value`; return the name and the value, or None when the word is no assignment."""
        split = split_assignment(word)
        if split is None:
            return None
        name, value, adds = split
        old = self.values.get(name, ()) if adds else ()
        self._spend_on(old)
        if word.items is not None:
            self.values[name] = (*old, *(text for item in word.items for text in self.resolve(item)))
        else:
            self.values[name] = (_concatenated([*old[:1], self.join(value)]),)
        return name, _concatenated(self.values[name], " ")

    def join(self, word: Word) -> Text:
        """Return a word as one text, as in an assignment or in quotes."""
        return _concatenated([_concatenated(self._values(piece), " ") for piece in word.pieces])

    def resolve(self, word: Word) -> Iterator[Text]:
        """Return the texts of a word of a command: a value outside of quotes is split at its blanks."""
        if word.items is not None:
            return iter([Text(word.raw, (word.raw,))])
        texts: list[list[Text]] = []
        for piece in word.pieces:
            for index, text in enumerate(self._parts(piece)):
                if index or not texts:
                    texts.append([])
                texts[-1].append(text)
        return map(_concatenated, texts)

    def _parts(self, piece: Piece) -> list[Text]:
        """Return the value of a piece, one text for each word that begins in it."""
        values = self._values(piece)
        if piece.kind == "variable" and not piece.quoted:
            return [part for value in values for part in _split(value)]
        return list(values) if piece.text.endswith("[@]") else [_concatenated(values, " ")]

    def _values(self, piece: Piece) -> tuple[Text, ...]:
        if piece.kind == "text":
            return (Text(piece.text),)
        name = piece.text.removesuffix("[@]")
        if piece.kind == "variable" and name in PLACEHOLDERS:
            self.used.add(name)
            return (Text(f"{_MARK}{PLACEHOLDERS[name]}{_MARK}"),)
        if piece.kind == "variable" and name in self.values:
            self.used.add(name)
            self._spend_on(self.values[name])
            return self.values[name] if piece.text != name else self.values[name][:1] or (Text(""),)
        if piece.kind == "variable" and name in self.given:
            return (Text(self.given[name]),)
        if piece.kind == "variable" and piece.default is not None:
            self.defaults[piece.raw] = piece.default
            return (Text(piece.default),)
        return (Text(piece.raw, (piece.raw,)),)

    def _spend_on(self, values: Iterable[Text]) -> None:
        self.spend(sum(len(value.text) + len(value.unknown) + 1 for value in values))


def as_argument(text: str) -> str:
    """Return a text as an argument of an entry, where `{{name}}` stands for `{name}`."""
    written = re.sub(r"\{([a-z][a-z0-9_]*)\}", r"{{\1}}", text)
    return re.sub(f"{_MARK}([a-z_]+){_MARK}", r"{\1}", written)


def as_written(text: str) -> str:
    """Return a text for people, with placeholders as `{name}`."""
    return re.sub(f"{_MARK}([a-z_]+){_MARK}", r"{\1}", text)


def is_fixed(text: Text) -> bool:
    """Return whether a text is the same for every rank and known here."""
    return not text.unknown and _MARK not in text.text


def fixed_number(text: Text) -> int | None:
    """Return a count from 1 that is the same for every rank and known here."""
    written = text.text
    known = is_fixed(text) and written.isascii() and written.isdigit() and len(written) < 6
    return int(written) or None if known else None


def split_assignment(word: Word) -> tuple[str, Word, bool] | None:
    """Split `NAME=value` and `NAME+=value` into the name, the value, and whether it is added."""
    written = ""
    for index, piece in enumerate(word.pieces):
        if piece.kind != "text" or piece.quoted:
            return None
        if piece.text == "=":
            name = written.removesuffix("+")
            if not (name.isascii() and name.isidentifier()):
                return None
            rest = word.pieces[index + 1 :]
            raw = "".join(piece.raw for piece in rest)
            return name, Word(raw=raw, pieces=rest, items=word.items), written.endswith("+")
        written += piece.text
    return None


def _concatenated(texts: Iterable[Text], between: str = "") -> Text:
    texts = list(texts)
    return Text(between.join(text.text for text in texts), tuple(part for text in texts for part in text.unknown))


def _split(value: Text) -> list[Text]:
    """Split at blanks, but not within parts that only a shell could compute, which are in the text in their order."""
    words: list[tuple[list[str], list[str]]] = []
    at, joins = 0, False
    for unknown in (*value.unknown, ""):
        found = value.text.find(unknown, at) if unknown else len(value.text)
        if found < 0:
            continue
        known = value.text[at:found]
        for index, part in enumerate(known.split()):
            if index or not joins or known[0].isspace():
                words.append(([], []))
            words[-1][0].append(part)
        joins = not known[-1].isspace() if known else joins
        if unknown:
            if not joins:
                words.append(([], []))
            words[-1][0].append(unknown)
            words[-1][1].append(unknown)
            joins = True
        at = found + len(unknown)
    return [Text("".join(parts), tuple(inside)) for parts, inside in words]
