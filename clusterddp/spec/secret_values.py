"""Values that look like secrets: by the name of a variable or of an option, by an address, by how a token begins."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "(not shown)"
_ARGUMENTS = frozenset({"args", "kwargs", "command"})
_VARIABLE = re.compile(r"KEY|TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|PRIVATE", re.IGNORECASE)
_OPTION = re.compile(
    r"(^|[._-])(auth|token|password|passwd|passphrase|secret|credentials?|(api|access|private|secret|auth)[_-]?key)"
    r"($|[._-])|(token|password|secret|apikey)$",
    re.IGNORECASE,
)
"""Whole words: `key_dim`, `tokenizer` and `max_tokens` are usual options of a training."""
_URL = re.compile(r"://[^/@\s:]*:[^/@\s]*@")
_VALUE = re.compile(
    r"(gh[pousr]|github_pat|hf|glpat|sk|xox[abprs])[_-][\w-]{16,}|(AKIA|ASIA)[0-9A-Z]{16}|-----BEGIN .*PRIVATE KEY"
)
"""The first characters of tokens of GitHub, Hugging Face, GitLab, OpenAI, Slack and AWS, and of private keys."""
_ANYWHERE = re.compile(rf"(?<![A-Za-z0-9])({_VALUE.pattern})|(?<= )[0-9a-f]{{40}}(?![A-Za-z0-9])")
"""The same within a text, and a key as `wandb login` takes it."""
_NAMED = re.compile(r"(?<![A-Za-z0-9_])([A-Za-z0-9_]+)=(?!\(not shown\))(\"[^\"]*\"|'[^']*'|\S+)")


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable looks like a secret."""
    return bool(_VARIABLE.search(name)) or _is_secret_value(value)


def hide_secret_arguments(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a spec with `HIDDEN` in place of what looks like a secret.

    That is the value of an option with such a name (`--token x`, `--token=x`, `wandb.api_key=x`, a keyword of a
    function), and a value that looks like a token or has an address with a password.
    """
    return {key: _hide(value) if key in _ARGUMENTS else value for key, value in entry.items()}


def hide_in_text(text: str) -> str:
    """Return a line of a script, or any other text, with `HIDDEN` in place of what looks like a secret."""
    text = _URL.sub(f"://{HIDDEN}@", _ANYWHERE.sub(HIDDEN, _hide_in_command(text)))
    return _NAMED.sub(lambda match: f"{match[1]}={HIDDEN}" if is_secret(match[1], match[2]) else match[0], text)


def _hide(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: HIDDEN if _is_secret_option(str(name), each) else _hide(each) for name, each in value.items()}
    if isinstance(value, str):
        return _hide_in_command(value)
    if isinstance(value, Sequence):
        return hide_secret_words(value)
    return value


def hide_secret_words(words: Sequence[Any]) -> list[Any]:
    """Return arguments with `HIDDEN` in place of what looks like a secret."""
    hidden: list[Any] = []
    takes_secret = False
    for word in words:
        is_option = isinstance(word, str) and word.startswith("-") and len(word) > 1
        name, equals, value = word.partition("=") if isinstance(word, str) else ("", "", str(word))
        if equals and _is_secret_option(name, value):
            hidden.append(f"{name}={HIDDEN}")
        else:
            is_value = not is_option and (takes_secret or _is_secret_value(str(word)))
            hidden.append(HIDDEN if is_value else word)
        takes_secret = is_option and not equals and _is_secret_option(name, "")
    return hidden


def _hide_in_command(command: str) -> str:
    """Hide the secrets of a shell command; one without any stays as it is."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    hidden = hide_secret_words(words)
    return command if hidden == words else " ".join(hidden)


def _is_secret_option(name: str, value: Any) -> bool:
    return bool(_OPTION.search(name.lstrip("-+~"))) or _is_secret_value(str(value))


def _is_secret_value(value: str) -> bool:
    return bool(_URL.search(value) or _VALUE.match(value))
