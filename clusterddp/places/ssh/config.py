"""How a host is reached: OpenSSH's own reading of the user's ssh_config (`ssh -G HOST`), as a value."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from clusterddp.errors import SshError

DEFAULT_PORT = 22
_MAX_JUMPS = 8
_MAX_INCLUDES = 4
_ASK_TIMEOUT_S = 20  # `Match exec` and `Match host` may ask a name server
_JUMP = re.compile(r"(?:ssh://)?(?:(?P<user>.+)@)?(?:\[(?P<bracketed>[^\]]+)\]|(?P<plain>[^:]+))(?::(?P<port>\d+))?/?")
_FAMILIES = {"inet": 4, "inet6": 6}


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """How one host is reached, as `ssh HOST` would reach it; the files that it names may not exist."""

    host: str
    """As the user names it."""
    hostname: str
    port: int
    user: str
    jumps: tuple[Destination, ...] = ()
    """The jump hosts, the first hop first; they have no jumps of their own."""
    proxy_command: str | None = None
    proxy_template: str | None = None
    """The ProxyCommand before %h and the like were filled in: the same for all hosts behind one bastion."""
    identity_files: tuple[Path, ...] = ()
    identities_only: bool = False
    agent: str | None = None
    """The socket of the agent."""
    known_hosts: tuple[Path, ...] = ()
    """The user's files, then the machine's."""
    host_key_alias: str | None = None
    host_key_algorithms: tuple[str, ...] = ()
    ca_algorithms: tuple[str, ...] = ()
    revoked_keys: Path | None = None
    connect_timeout_s: float | None = None
    keepalive_s: int | None = None
    ip_version: int | None = None

    @property
    def address(self) -> str:
        """The address and port, as text: `10.0.0.1:22`."""
        return f"[{self.hostname}]:{self.port}" if ":" in self.hostname else f"{self.hostname}:{self.port}"

    @property
    def known_as(self) -> str:
        """The host's name in known_hosts."""
        if self.host_key_alias:
            return self.host_key_alias
        name = self.hostname.lower()
        return name if self.port == DEFAULT_PORT else f"[{name}]:{self.port}"

    @property
    def first_hop(self) -> str:
        """The first hop, as text: connections with the same first hop share one sshd."""
        first = self.jumps[0] if self.jumps else self
        return first.proxy_template or first.address


def resolve(host: str, environ: Mapping[str, str]) -> Destination:
    """Ask OpenSSH how `host` and its jump hosts are reached.

    Raises: SshError.
    """
    return _resolve(host, [], environ, depth=0)


def config_names(config: Path) -> list[str]:
    """List the hosts that an ssh_config and the files it includes name without a wildcard, for completion."""
    hosts = (words for keyword, words in _config_lines(config) if keyword == "host")
    return list(dict.fromkeys(word for words in hosts for word in words if not set(word) & set('*?!"')))


def home() -> Path:
    """Return the home directory that OpenSSH uses: the user database's; HOME where that has no such user."""
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return Path.home()


def _config_lines(config: Path, depth: int = 0) -> Iterator[tuple[str, list[str]]]:
    """Yield the keyword and the words of each line of an ssh_config and of the files that it includes."""
    try:
        lines = config.read_text(errors="replace").splitlines() if depth < _MAX_INCLUDES else []
    except OSError:
        return
    for line in lines:
        keyword, *words = re.split(r"[\s=]+", line.strip())
        if keyword.lower() == "include":
            for word in words:
                pattern = config.parent / _tilde(word)
                for path in sorted(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))):
                    yield from _config_lines(path, depth + 1)
        else:
            yield keyword.lower(), words


def _resolve(host: str, options: list[str], environ: Mapping[str, str], *, depth: int) -> Destination:
    if depth > _MAX_JUMPS:
        raise SshError(host, "resolve", "its ProxyJump leads in a circle", hint=f"ssh -G {host} | grep proxyjump")
    found = _ask(host, options, environ)
    value = {key: values[0] for key, values in found.items() if values[0] != "none"}
    tokens = _tokens(host, value)
    identities = (_expand_path(text, tokens, environ) for text in found.get("identityfile", ()))
    template, jump = value.get("proxycommand"), value.get("proxyjump")
    timeout, alive = value.get("connecttimeout", ""), value.get("serveraliveinterval", "0")
    return Destination(
        host=host,
        hostname=value["hostname"],
        port=int(value["port"]),
        user=value["user"],
        jumps=_resolve_jumps(host, jump, environ, depth=depth) if jump else (),
        proxy_command=_expand(template, tokens) if template else None,
        proxy_template=template,
        identity_files=tuple(path for path in identities if str(path) != "none"),
        identities_only=value.get("identitiesonly") == "yes",
        agent=_agent(found.get("identityagent", ["SSH_AUTH_SOCK"])[0], environ),
        known_hosts=(*_paths(value.get("userknownhostsfile")), *_paths(value.get("globalknownhostsfile"))),
        host_key_alias=value.get("hostkeyalias") or None,
        host_key_algorithms=tuple(value.get("hostkeyalgorithms", "").split(",")),
        ca_algorithms=tuple(value.get("casignaturealgorithms", "").split(",")),
        revoked_keys=next(iter(_paths(value.get("revokedhostkeys"))), None),
        connect_timeout_s=float(timeout) if timeout.isdigit() else None,
        keepalive_s=int(alive) if alive.isdigit() and alive != "0" else None,
        ip_version=_FAMILIES.get(value.get("addressfamily", "any")),
    )


def _resolve_jumps(host: str, jump: str, environ: Mapping[str, str], *, depth: int) -> tuple[Destination, ...]:
    """Resolve `a,b`: its own configuration decides how `a` is reached; `b` is reached through `a`."""
    jumps: list[Destination] = []
    for text in jump.split(","):
        match = _JUMP.fullmatch(text.strip())
        if match is None:
            raise SshError(host, "resolve", f"ProxyJump {text!r} is not a host", hint=f"ssh -G {host} | grep proxyjump")
        options = [] if not jumps else ["-o", "ProxyJump=none"]
        options += ["-l", match["user"]] if match["user"] else []
        options += ["-p", match["port"]] if match["port"] else []
        hop = _resolve(match["bracketed"] or match["plain"], options, environ, depth=depth + 1)
        name = text.strip() if match["port"] is None or "://" in text else f"ssh://{text.strip()}"
        jumps += [*hop.jumps, replace(hop, host=name, jumps=())]
    return tuple(jumps)


def _ask(host: str, options: list[str], environ: Mapping[str, str]) -> dict[str, list[str]]:
    argv = ["ssh", "-T", "-G", *options, "--", host]
    try:
        done = subprocess.run(
            argv,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=_ASK_TIMEOUT_S,
            env=dict(environ),
        )
    except FileNotFoundError as error:
        raise SshError(host, "resolve", "there is no ssh on PATH", hint="install OpenSSH's client") from error
    except subprocess.TimeoutExpired as error:
        late = f"ssh -G did not answer within {_ASK_TIMEOUT_S} s"
        raise SshError(host, "resolve", late, hint="a `Match exec` of ssh_config may hang") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ssh -G exited with {done.returncode}"]
        raise SshError(host, "resolve", lines[0].strip(), hint=f"ssh -G {host}")
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key.lower(), []).append(value)
    return found


def _agent(text: str, environ: Mapping[str, str]) -> str | None:
    if text == "none":
        return None
    if text == "SSH_AUTH_SOCK":
        return environ.get("SSH_AUTH_SOCK") or None
    if text.startswith("$"):
        return environ.get(text.strip("${}")) or None
    return _tilde(text)


def _tokens(host: str, value: Mapping[str, str]) -> dict[str, str]:
    machine = os.uname().nodename
    account = pwd.getpwuid(os.getuid())
    return {
        "%": "%",
        "d": account.pw_dir,
        "h": value["hostname"],
        "i": str(account.pw_uid),
        "k": value.get("hostkeyalias") or host,
        "L": machine.partition(".")[0],
        "l": machine,
        "n": host,
        "p": value["port"],
        "r": value["user"],
        "u": account.pw_name,
    }


def _expand_path(text: str, tokens: Mapping[str, str], environ: Mapping[str, str]) -> Path:
    variables = re.sub(r"\$\{(\w+)\}", lambda match: environ.get(match[1], ""), _tilde(text))
    return Path(_expand(variables, tokens))


def _expand(text: str, tokens: Mapping[str, str]) -> str:
    """Replace `%h` and the like; an unknown token stays."""
    return re.sub(r"%(.)", lambda match: tokens.get(match[1], match[0]), text)


def _tilde(text: str) -> str:
    return f"{home()}{text[1:]}" if text == "~" or text.startswith("~/") else text


def _paths(text: str | None) -> tuple[Path, ...]:
    return tuple(Path(_tilde(word)) for word in (text or "").split() if word not in {"none", "/dev/null"})
