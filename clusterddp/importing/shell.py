"""Parses shell text into words without executing it, and gives words the values that the script itself sets.

What a shell would compute is kept as written, and marked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from clusterddp.errors import UsageError

_BREAKS = frozenset(" \t\n;&|()<>")
_BRACES = re.compile(r"\{([^{}\s]*)\}")
_RUN = re.compile(r"[A-Za-z0-9_./:,+@%-]+")
_QUOTED_RUN = re.compile(r'[^"$`\\]+')
_BLANKS = re.compile(r"(?:[ \t]|\\\n)*")
_REST_OF_LINE = re.compile(r"[^\n]*")
_OPERATOR = re.compile(r";;|&&|\|\||\|&|.", re.DOTALL)
_REDIRECTS = re.compile(r"[<>]|&>|0<|[123]>")
_REDIRECTION = re.compile(r"[^<>]*[<>&|-]*")
_EXPANSION = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|[-@*#?$!0-9])")
_NAMED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[@*]\])?(?::-([^$`\\'\"]*))?")
"""The forms of `${...}` that are understood: a name, all items of an array, a default."""
_MAX_DEPTH = 50
"""Quotes, `$(...)` and arrays are parsed to this depth; deeper ones count as never closed."""
_ESCAPED_IN_QUOTES = frozenset('$`"\\\n')


Kind = Literal["text", "variable", "opaque"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a word: text, a variable, or what only a shell could compute."""

    kind: Kind
    text: str
    """Of a variable its name; `[@]` behind it for all items of an array."""
    raw: str
    quoted: bool
    default: str | None = None
    """Of `${NAME:-default}`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """One word as it is written, and its parts."""

    raw: str
    pieces: tuple[Piece, ...]
    items: tuple[Word, ...] | None = None
    """Of `NAME=(a b)`: the words in the brackets; the pieces are then those of `NAME=`."""

    @property
    def plain(self) -> str | None:
        """Its text, if a shell would not change it; else None."""
        if any(piece.kind != "text" for piece in self.pieces) or self.items is not None:
            return None
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """One command with its words, up to the operator that ends it."""

    line: int
    """Counts from 1."""
    text: str
    """As it is written, redirections included, on one line."""
    words: tuple[Word, ...]
    redirections: tuple[str, ...] = ()
    ended_by: str = "\n"
    """`;`, `&&`, `||`, `|`, `&`, a bracket, or the end of the line."""
    broken: bool = False
    """A quote or bracket in it is never closed."""


def split_statements(text: str) -> list[Statement]:
    """Split shell text into its statements, without comments; any text is accepted."""
    return [each for each in _Scanner(text).statements() if each.words or each.redirections]


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text.replace("\r\n", "\n")
        self._at = 0
        self._broken = False
        self._depth = 0
        self._heredocs: list[str] = []
        self._line, self._counted = 1, 0
        """The line of the character at `_counted`."""

    def statements(self) -> Iterator[Statement]:
        while self._at < len(self._text):
            yield self._statement()

    def _statement(self) -> Statement:
        self._take(_BLANKS)
        begin, words, redirections, ended_by = self._at, list[Word](), list[str](), ""
        self._broken = False
        end = begin
        while self._at < len(self._text) and not ended_by:
            char = self._text[self._at]
            if char == "#":
                self._take(_REST_OF_LINE)
            elif _REDIRECTS.match(self._text, self._at):
                redirections.append(self._redirection())
                end = self._at
            elif char in "\n;&|()":
                ended_by = self._take(_OPERATOR)
                if ended_by == "\n":
                    self._skip_heredocs()
            else:
                words.append(self._word())
                end = self._at
            self._take(_BLANKS)
        return Statement(
            line=self._line_of(begin),
            text=" ".join(self._text[begin:end].replace("\\\n", " ").split()),
            words=tuple(words),
            redirections=tuple(redirections),
            ended_by=ended_by or "\n",
            broken=self._broken,
        )

    def _line_of(self, at: int) -> int:
        """Return the line of a character; calls go forward in the text."""
        self._line += self._text.count("\n", self._counted, at)
        self._counted = at
        return self._line

    def _redirection(self) -> str:
        begin = self._at
        operator = self._take(_REDIRECTION)
        if self._text.startswith("(", self._at):  # <(command)
            self._opaque_bracket(self._at)
            return self._text[begin : self._at]
        self._take(_BLANKS)
        has_word = self._at < len(self._text) and self._text[self._at] not in "\n;&|()<>#"
        word = self._word() if has_word else None
        if word is not None and operator.endswith(("<<", "<<-")):
            self._heredocs.append(word.plain or word.raw)
        return self._text[begin : self._at]

    def _skip_heredocs(self) -> None:
        for delimiter in self._heredocs:
            while self._at < len(self._text):
                line = self._take(_REST_OF_LINE)
                self._at = min(len(self._text), self._at + 1)
                if line.strip("\t") == delimiter:
                    break
        self._heredocs.clear()

    def _take(self, pattern: re.Pattern[str]) -> str:
        """Consume what a pattern matches here, and return it."""
        match = pattern.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return match[0] if match else ""

    def _take_to(self, mark: str) -> None:
        """Consume up to the next such mark after this one, or the rest where there is none."""
        end = self._text.find(mark, self._at + 1)
        self._broken |= end < 0
        self._at = len(self._text) if end < 0 else end + 1

    def _piece(
        self, kind: Kind, begin: int, *, quoted: bool, text: str | None = None, default: str | None = None
    ) -> Piece:
        """Return what was read since `begin` as a piece; `text`: its meaning, where that differs."""
        raw = self._text[begin : self._at]
        return Piece(kind=kind, text=raw if text is None else text, raw=raw, quoted=quoted, default=default)

    def _word(self) -> Word:
        begin, pieces, items = self._at, list[Piece](), None
        while self._at < len(self._text) and self._text[self._at] not in _BREAKS:
            pieces += self._pieces()
            if self._text.startswith("(", self._at) and self._text[self._at - 1] == "=":
                items = self._array()
                break
        return Word(raw=self._text[begin : self._at], pieces=tuple(pieces), items=items)

    def _array(self) -> tuple[Word, ...]:
        self._at += 1
        self._depth += 1
        items = []
        if self._depth > _MAX_DEPTH:
            self._at = len(self._text)
        while self._at < len(self._text) and self._text[self._at] != ")":
            char = self._text[self._at]
            if char == "#":
                self._take(_REST_OF_LINE)
            elif char in _BREAKS:
                self._at += 1
            else:
                items.append(self._word())
        self._depth -= 1
        self._broken |= self._at >= len(self._text)
        self._at += 1
        return tuple(items)

    def _pieces(self) -> list[Piece]:
        """Read the next part of a word outside of quotes."""
        char = self._text[self._at]
        if char == "'":
            return [self._single_quoted()]
        if char == '"':
            return self._double_quoted()
        if char in "$`":
            return [self._expansion(quoted=False)]
        begin = self._at
        if self._take(_RUN):
            return [self._piece("text", begin, quoted=False)]
        self._at += 1
        if char == "\\":
            follower = self._text[self._at : self._at + 1]
            self._at += len(follower)
            text = "" if follower == "\n" else follower or char
            return [self._piece("text", begin, quoted=True, text=text)]
        at_begin = begin == 0 or self._text[begin - 1] in _BREAKS or self._text[begin - 1] == "="
        braces = _BRACES.match(self._text, begin)  # `{a,b}` and `{1..3}` become several words, `{a}` stays
        computed = char in "*?[" or (char == "~" and at_begin)
        computed = computed or (braces is not None and ("," in braces[1] or ".." in braces[1]))
        return [self._piece("opaque" if computed else "text", begin, quoted=False)]

    def _single_quoted(self) -> Piece:
        begin = self._at
        self._take_to("'")
        is_closed = self._at > begin + 1 and self._text[self._at - 1] == "'"
        return self._piece("text", begin, quoted=True, text=self._text[begin + 1 : self._at - is_closed])

    def _double_quoted(self) -> list[Piece]:
        self._at += 1
        pieces = [Piece(kind="text", text="", raw='"', quoted=True)]
        while self._at < len(self._text) and self._text[self._at] != '"':
            begin, char = self._at, self._text[self._at]
            if char in "$`":
                pieces.append(self._expansion(quoted=True))
            elif self._take(_QUOTED_RUN):
                pieces.append(self._piece("text", begin, quoted=True))
            else:  # a backslash
                follower = self._text[begin + 1 : begin + 2]
                escapes = follower in _ESCAPED_IN_QUOTES
                self._at += 1 + escapes
                text = follower.strip("\n") if escapes else char
                pieces.append(self._piece("text", begin, quoted=True, text=text))
        self._broken |= self._at >= len(self._text)
        self._at = min(len(self._text), self._at + 1)
        return pieces

    def _expansion(self, *, quoted: bool) -> Piece:
        """Read what begins with `$` or a backquote."""
        begin = self._at
        if self._text.startswith("${", begin):
            return self._braced(quoted=quoted)
        if self._text.startswith("$(", begin):
            self._opaque_bracket(begin + 1)
        elif self._text[begin] == "`":
            self._take_to("`")
        elif match := _EXPANSION.match(self._text, begin):
            self._at = match.end()
            if match[1]:
                return self._piece("variable", begin, quoted=quoted, text=match[1])
        else:
            self._at += 1
            return self._piece("text", begin, quoted=quoted)
        return self._piece("opaque", begin, quoted=quoted)

    def _braced(self, *, quoted: bool) -> Piece:
        """Read `${NAME}`, `${NAME[@]}`, `${NAME:-default}`; any other `${...}` is opaque."""
        begin = self._at
        depth = 0
        while self._at < len(self._text):
            depth += {"{": 1, "}": -1}.get(self._text[self._at], 0)
            self._at += 1
            if depth == 0 and self._at > begin + 1:
                break
        self._broken |= depth > 0
        named = _NAMED.fullmatch(self._text[begin + 2 : self._at - 1])
        if named is None:
            return self._piece("opaque", begin, quoted=quoted)
        text = named[1] + ("[@]" if named[2] else "")
        return self._piece("variable", begin, quoted=quoted, text=text, default=named[3])

    def _opaque_bracket(self, begin: int) -> None:
        """Consume the bracket that opens at `begin`; quotes in it may have other brackets."""
        depth, self._at = 0, begin
        self._depth += 1
        while self._at < len(self._text) and self._depth <= _MAX_DEPTH:
            char = self._text[self._at]
            if char in "'\"":
                self._single_quoted() if char == "'" else self._double_quoted()
                continue
            if char == "\\":
                self._at += 1
            depth += {"(": 1, ")": -1}.get(char, 0)
            self._at += 1
            if depth == 0:
                self._depth -= 1
                return
        self._depth -= 1
        self._at = len(self._text)
        self._broken = True


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
