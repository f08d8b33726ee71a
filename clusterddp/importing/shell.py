"""Shell text as words: read, never executed; whatever a shell would compute stays as it is written, marked as such."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_BREAKS = frozenset(" \t\n;&|()<>")
_GLOB = frozenset("*?[")
_BRACES = re.compile(r"\{([^{}\s]*)\}")
_RUN = re.compile(r"[A-Za-z0-9_./:,+@%-]+")
_QUOTED_RUN = re.compile(r'[^"$`\\]+')
_MAX_DEPTH = 50
"""Quotes, `$(...)` and arrays are followed to this depth; what is deeper counts as never closed."""
_ESCAPED_IN_QUOTES = frozenset('$`"\\\n')
_NAME_FIRST = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_NAME = _NAME_FIRST | frozenset("0123456789")


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a word: text, a variable's value, or what only a shell could tell."""

    kind: Literal["text", "variable", "opaque"]
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
        """Its text, where a shell would put nothing else in its place."""
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


def split_statements(text: str, first_line: int = 1) -> list[Statement]:
    """Split shell text into its statements, comments left out; any text is taken."""
    return _Scanner(text, first_line).statements()


class _Scanner:
    def __init__(self, text: str, first_line: int) -> None:
        self._text = text.replace("\r\n", "\n")
        self._at = 0
        self._broken = False
        self._depth = 0
        self._heredocs: list[str] = []
        self._line, self._counted = first_line, 0
        """The line of the character at `_counted`."""

    def statements(self) -> list[Statement]:
        found = []
        while self._at < len(self._text):
            statement = self._statement()
            if statement.words or statement.redirections:
                found.append(statement)
        return found

    def _statement(self) -> Statement:
        self._skip_blanks()
        begin, words, redirections, ended_by = self._at, list[Word](), list[str](), ""
        self._broken = False
        end = begin
        while self._at < len(self._text) and not ended_by:
            char = self._text[self._at]
            if char == "#":
                self._skip_comment()
            elif char in "<>" or self._redirects_a_number():
                redirections.append(self._redirection())
                end = self._at
            elif char in "\n;&|()":
                ended_by = self._operator()
            else:
                words.append(self._word())
                end = self._at
            self._skip_blanks()
        return Statement(
            line=self._line_of(begin),
            text=" ".join(self._text[begin:end].replace("\\\n", " ").split()),
            words=tuple(words),
            redirections=tuple(redirections),
            ended_by=ended_by or "\n",
            broken=self._broken,
        )

    def _line_of(self, at: int) -> int:
        """Return the line of a character, which none that is asked for later precedes."""
        self._line += self._text.count("\n", self._counted, at)
        self._counted = at
        return self._line

    def _operator(self) -> str:
        for operator in (";;", "&&", "||", "|&"):
            if self._text.startswith(operator, self._at):
                self._at += len(operator)
                return operator
        char = self._text[self._at]
        self._at += 1
        if char == "\n":
            self._skip_heredocs()
        return char

    def _redirects_a_number(self) -> bool:
        """Say whether `2>` begins here; `&>` as well."""
        rest = self._text[self._at : self._at + 3]
        return rest.startswith(("&>", "0<", "1>", "2>", "3>"))

    def _redirection(self) -> str:
        begin = self._at
        while self._at < len(self._text) and self._text[self._at] not in "<>":
            self._at += 1
        while self._at < len(self._text) and self._text[self._at] in "<>&|-":
            self._at += 1
        operator = self._text[begin : self._at]
        if self._text.startswith("(", self._at):  # <(command)
            self._opaque_bracket(self._at)
            return self._text[begin : self._at]
        self._skip_blanks()
        has_word = self._at < len(self._text) and self._text[self._at] not in "\n;&|()<>#"
        word = self._word() if has_word else None
        if word is not None and operator.endswith(("<<", "<<-")):
            self._heredocs.append(word.plain or word.raw)
        return self._text[begin : self._at]

    def _skip_heredocs(self) -> None:
        for delimiter in self._heredocs:
            while self._at < len(self._text):
                end = self._text.find("\n", self._at)
                end = len(self._text) if end < 0 else end
                line = self._text[self._at : end]
                self._at = min(len(self._text), end + 1)
                if line.strip("\t") == delimiter:
                    break
        self._heredocs.clear()

    def _skip_blanks(self) -> None:
        while self._at < len(self._text):
            if self._text.startswith("\\\n", self._at):
                self._at += 2
            elif self._text[self._at] in " \t":
                self._at += 1
            else:
                return

    def _skip_comment(self) -> None:
        end = self._text.find("\n", self._at)
        self._at = len(self._text) if end < 0 else end

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
                self._skip_comment()
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
        if run := _RUN.match(self._text, begin):
            self._at = run.end()
            return [Piece(kind="text", text=run[0], raw=run[0], quoted=False)]
        self._at += 1
        if char == "\\":
            follower = self._text[self._at : self._at + 1]
            self._at += len(follower)
            text = "" if follower == "\n" else follower or char
            return [Piece(kind="text", text=text, raw=self._text[begin : self._at], quoted=True)]
        at_begin = begin == 0 or self._text[begin - 1] in _BREAKS or self._text[begin - 1] == "="
        computed = char in _GLOB or (char == "~" and at_begin) or (char == "{" and self._expands_braces(begin))
        return [Piece(kind="opaque" if computed else "text", text=char, raw=char, quoted=False)]

    def _expands_braces(self, at: int) -> bool:
        """Say whether a shell makes several words of `{a,b}` or `{1..3}` here; `{a}` it leaves alone."""
        match = _BRACES.match(self._text, at)
        return match is not None and ("," in match[1] or ".." in match[1])

    def _single_quoted(self) -> Piece:
        begin = self._at
        end = self._text.find("'", begin + 1)
        self._broken |= end < 0
        self._at = len(self._text) if end < 0 else end + 1
        raw = self._text[begin : self._at]
        return Piece(kind="text", text=raw[1:] if end < 0 else raw[1:-1], raw=raw, quoted=True)

    def _double_quoted(self) -> list[Piece]:
        begin = self._at
        self._at += 1
        pieces = [Piece(kind="text", text="", raw='"', quoted=True)]
        while self._at < len(self._text) and self._text[self._at] != '"':
            char = self._text[self._at]
            if char in "$`":
                pieces.append(self._expansion(quoted=True))
                continue
            follower = self._text[self._at + 1 : self._at + 2]
            escapes = char == "\\" and follower in _ESCAPED_IN_QUOTES and follower != ""
            run = _QUOTED_RUN.match(self._text, self._at)
            raw = run[0] if run else self._text[self._at : self._at + 1 + escapes]
            self._at += len(raw)
            text = ("" if follower == "\n" else follower) if escapes else raw
            pieces.append(Piece(kind="text", text=text, raw=raw, quoted=True))
        self._broken |= self._at >= len(self._text)
        self._at = min(len(self._text), self._at + 1)
        return pieces if self._at > begin else []

    def _expansion(self, *, quoted: bool) -> Piece:
        begin = self._at
        if self._text[begin] == "`":
            return self._backquoted(quoted=quoted)
        follower = self._text[begin + 1 : begin + 2]
        if follower == "(":
            self._opaque_bracket(begin + 1)
        elif follower == "{":
            return self._braced(quoted=quoted)
        elif follower in _NAME_FIRST and follower:
            self._at += 1
            while self._at < len(self._text) and self._text[self._at] in _NAME:
                self._at += 1
            raw = self._text[begin : self._at]
            return Piece(kind="variable", text=raw[1:], raw=raw, quoted=quoted)
        elif follower and (follower in "@*#?$!-" or follower.isdigit()):
            self._at += 2
        else:
            self._at += 1
            return Piece(kind="text", text="$", raw="$", quoted=quoted)
        raw = self._text[begin : self._at]
        return Piece(kind="opaque", text=raw, raw=raw, quoted=quoted)

    def _backquoted(self, *, quoted: bool) -> Piece:
        begin = self._at
        end = self._text.find("`", begin + 1)
        self._broken |= end < 0
        self._at = len(self._text) if end < 0 else end + 1
        raw = self._text[begin : self._at]
        return Piece(kind="opaque", text=raw, raw=raw, quoted=quoted)

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
        raw = self._text[begin : self._at]
        inner = raw[2:-1]
        name, colon, default = inner.partition(":-")
        base = name.removesuffix("[@]").removesuffix("[*]")
        named = base[:1] in _NAME_FIRST and base != "" and all(char in _NAME for char in base)
        if not named or any(char in "$`\\'\"" for char in default):
            return Piece(kind="opaque", text=raw, raw=raw, quoted=quoted)
        text = base if base == name else f"{base}[@]"
        return Piece(kind="variable", text=text, raw=raw, quoted=quoted, default=default if colon else None)

    def _opaque_bracket(self, begin: int) -> None:
        """Go behind the bracket that opens at `begin`; quotes in it may hold other brackets."""
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
