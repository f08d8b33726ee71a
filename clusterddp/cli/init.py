"""The command init: asks at most three questions and writes a commented spec to start from."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clusterddp.cli.arguments import HostName, collected, command
from clusterddp.cli.login import Node, ask_login, find_node, profile_option
from clusterddp.cli.terminal import Terminal, put, say, say_note
from clusterddp.errors import SpecError, UsageError
from clusterddp.system.files import write_text
from clusterddp.system.templates import read_template

if TYPE_CHECKING:
    from clusterddp.spec.tree import Node as Value

_LAUNCHERS = click.Choice(["local", "ssh", "slurm"])
_NO_SCRIPT = "none"
_DISTRIBUTED = re.compile(r"\s*(import|from) torch\.distributed|\s*from torch import .*\bdistributed\b")
_MAIN = re.compile(r"^if __name__ == [\"']__main__[\"']")
_MOST_BYTES = 1_000_000
_COMMENT_COLUMN = 30
_KEY = re.compile(r"(  )?([a-z_]+):(?= |$)")
_TRAIN = re.compile(r"^train:.*\Z", re.MULTILINE | re.DOTALL)
_HOSTS = re.compile(r"^  hosts: .*$", re.MULTILINE)
_TOGETHER = ("resources.procs_per_node", "resources.gpus_per_node")
"""Keys of which one follows the other."""
_ENTRY = """\
entry:
  script: {script}
  # args: [--lr, 0.1, --out, "{{output_dir}}"]   # {{output_dir}}: a directory for the results of this run alone

# The built-in trainer instead of a script:
# train: {{model: resnet18, dataset: cifar10, epochs: 30}}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What options name; what is not named is asked for on a terminal, and is the default elsewhere."""

    launcher: str | None
    hosts: str | None
    partition: str | None
    script: str | None
    yes: bool
    asks: bool = False
    given: Mapping[str, Value] = field(default_factory=dict)
    """What the site file and the project file give, by dotted key."""

    def given_text(self, key: str) -> str | None:
        return getattr(self.given.get(key), "text", None)


@command("init")
@click.argument("path", default="job.yaml", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--launcher", type=_LAUNCHERS, help="What starts the ranks; default: slurm where sbatch is, else local.")
@click.option("--hosts", metavar="H,H", type=HostName(), help="With launcher ssh: hosts such as gpu01,gpu[03-04].")
@click.option("--partition", metavar="NAME", help="With launcher slurm: for this partition, not the usual one.")
@click.option("--script", metavar="FILE", help="What the ranks run; none: the built-in trainer.")
@click.option("-y", "--yes", is_flag=True, help="Ask nothing, take the defaults.")
@profile_option
@click.option("--force", is_flag=True, help="Overwrite PATH when it exists.")
@collected("answers", Answers)
@click.pass_obj
def init(terminal: Terminal, *, path: Path, answers: Answers, profile: str | None, force: bool) -> None:
    """Write a commented spec to PATH (job.yaml) to start from.

    On a terminal it asks what the options leave open: what starts the ranks, the hosts or the partition, the script.
    What clusterddp.yaml or a site file gives is left out.

    With --launcher slurm, on a machine of the cluster or with a profile that has a login node, its values are the
    cluster's: partition, GPUs, cores, memory, time limit, account; notes explain what the cluster's settings mean for
    runs. A PATH of - is standard output.
    """
    from clusterddp.spec.load import read_shared_values

    _refuse_place(path, force=force)
    asks = not answers.yes and sys.stdin.isatty() and sys.stdout.isatty()
    answers = replace(answers, asks=asks, given=read_shared_values(terminal.environ, path))
    try:
        text, notes = _first_spec(answers, terminal, profile)
    except click.Abort as abort:
        raise KeyboardInterrupt("interrupted: nothing was written") from abort
    if str(path) == "-":
        put(text.rstrip("\n"))
    elif not write_text(path, text, exclusive=not force) and not force:
        raise _exists(path)
    else:
        say(f"wrote {path}")
    for note in notes:
        say_note(note)
    if str(path) != "-":
        name = shlex.quote(str(path))
        say(f"  check it  clusterddp submit {name} --dry-run")
        say(f"  run it    clusterddp submit {name} --follow")


COMMANDS = {"init": init}


def _first_spec(answers: Answers, terminal: Terminal, profile: str | None) -> tuple[str, list[str]]:
    """Return the text of the spec, and notes on it."""
    node = find_node(profile, terminal.environ) if profile else None
    launcher = _choose_launcher(answers, terminal, has_login=node is not None)
    text, notes, chosen = read_template(f"init_{launcher}.yaml"), list[str](), set[str]()
    if answers.given_text("launcher") != launcher:
        chosen.add("launcher")
    if launcher == "slurm":
        node = node or find_node(profile, terminal.environ)
        text, notes = _fill_slurm(text, answers, terminal, node)
        chosen |= {"slurm.partition"} if answers.partition else set()
    elif launcher == "ssh" and (answers.hosts or "ssh.hosts" not in answers.given):
        text, notes = _fill_hosts(text, answers)
        chosen.add("ssh.hosts")
    script = _choose_script(answers)
    text = text if script is None else with_script(text, script)
    files = {key: value.place.source for key, value in answers.given.items() if key not in chosen}
    return without_given(text, files), notes


def _choose_launcher(answers: Answers, terminal: Terminal, *, has_login: bool) -> str:
    """Raises: UsageError: options are for another launcher."""
    implied = "ssh" if answers.hosts is not None else "slurm" if answers.partition is not None else None
    if answers.hosts is not None and (answers.partition is not None or answers.launcher not in (None, "ssh")):
        raise UsageError("--hosts is for --launcher ssh")
    if answers.partition is not None and answers.launcher not in (None, "slurm"):
        raise UsageError("--partition is for --launcher slurm")
    named = answers.launcher or implied or answers.given_text("launcher")
    if named is not None:
        return named if named in _LAUNCHERS.choices else "local"
    has_slurm = has_login or shutil.which("sbatch", path=terminal.environ.get("PATH")) is not None
    usual = "slurm" if has_slurm else "local"
    if not answers.asks or not (has_slurm or _offered_hosts()):
        return usual
    say("What starts the ranks? local: this machine; ssh: hosts that ssh reaches; slurm: jobs of a cluster.")
    return str(click.prompt("launcher", type=_LAUNCHERS, default=usual, err=True))


def _fill_slurm(text: str, answers: Answers, terminal: Terminal, node: Node | None) -> tuple[str, list[str]]:
    from clusterddp.places.slurm.first_spec import slurm_spec

    def ask(names: Sequence[str], usual: str) -> str:
        return str(click.prompt("partition", type=click.Choice(list(names)), default=usual, err=True))

    partition = answers.partition or answers.given_text("slurm.partition")
    if node is not None:
        more = ["--partition", partition] if partition else []
        return ask_login(node, ["init", "--launcher", "slurm", "--script", _NO_SCRIPT, *more, "-"]).decode(), []
    try:
        return slurm_spec(text, terminal.environ, partition, choose=ask if answers.asks else None)
    except UsageError as error:
        if answers.partition is not None:
            raise
        raise UsageError(f"{answers.given['slurm.partition'].place.text}: {error.message}") from error


def _fill_hosts(text: str, answers: Answers) -> tuple[str, list[str]]:
    """Write the hosts into a spec for SSH. Raises: SpecError: a host is wrong."""
    usual = _offered_hosts()
    if answers.hosts is not None:
        hosts = _read_hosts(answers.hosts)
    elif answers.asks:
        say("Which hosts? The first one runs rank 0; gpu[01-04] is a set, gpu01:8 has 8 GPUs.")
        hosts = str(click.prompt("hosts", value_proc=_checked(_read_hosts), default=usual, err=True))
    elif usual:
        hosts = _read_hosts(usual)
    else:
        return text, ["the hosts in it are examples: name yours, or init --hosts gpu01,gpu02"]
    return _HOSTS.sub(lambda _: f"  hosts: {hosts}", text, count=1), []


def _offered_hosts() -> str | None:
    """Return the hosts of ./hostfile, or those that ~/.ssh/config names, as --hosts takes them."""
    from clusterddp.places.ssh.config import config_names, home
    from clusterddp.spec.hosts import read_hostfile
    from clusterddp.spec.tree import ListNode, Mapping, Scalar

    hostfile = Path("hostfile")
    if not hostfile.is_file():
        return ",".join(config_names(home() / ".ssh" / "config", machines_only=True)) or None
    node, names = read_hostfile(hostfile).node, list[str]()
    for host in node.items if isinstance(node, ListNode) else ():
        values = host.entries.values() if isinstance(host, Mapping) else [host]
        names.append(":".join(value.text for value in values if isinstance(value, Scalar)))
    return ",".join(names)


def _read_hosts(text: str) -> str:
    """Check hosts as a spec does; return them as YAML. Raises: SpecError."""
    from clusterddp.spec.hosts import parse_hosts
    from clusterddp.spec.load import load_spec
    from clusterddp.spec.yamlfile import flow_yaml

    alone = load_spec("name: x\nlauncher: ssh\n", environ={}, hosts=parse_hosts(text), whole=True)
    hosts = alone.job.model_dump(mode="json")["ssh"]["hosts"]
    return flow_yaml([host if set(host) > {"host"} else host["host"] for host in hosts])


def _choose_script(answers: Answers) -> str | None:
    """Return the script that the ranks run; None: the built-in trainer. Raises: UsageError: there is no such file."""
    if answers.script is not None:
        return _read_script(answers.script)
    scripts = _find_scripts(Path.cwd())
    usual = scripts[0] if len(scripts) == 1 else None
    if not answers.asks or not scripts:
        return usual
    say(f"What do the ranks run? A script ({', '.join(scripts)}), or {_NO_SCRIPT}: the built-in trainer.")
    script: str | None = click.prompt(
        "script", value_proc=_checked(_read_script), default=usual or _NO_SCRIPT, err=True
    )
    return script


def _read_script(text: str) -> str | None:
    """Check the name of a script; None: the built-in trainer. Raises: UsageError."""
    if text == _NO_SCRIPT:
        return None
    if not Path(text).expanduser().is_file():
        raise UsageError(f"{text}: there is no such file here", hint=f"{_NO_SCRIPT}: the built-in trainer")
    return text


def _find_scripts(directory: Path) -> list[str]:
    """List the scripts that import torch.distributed; without one, those that are programs."""
    found: dict[str, list[str]] = {path.name: _lines(path) for path in sorted(directory.glob("*.py"))}
    for pattern in (_DISTRIBUTED, _MAIN):
        if names := [name for name, lines in found.items() if any(map(pattern.match, lines))]:
            return names
    return []


def _lines(path: Path) -> list[str]:
    try:
        if path.is_file() and path.stat().st_size <= _MOST_BYTES:
            return path.read_text(errors="replace").splitlines()
    except OSError:
        pass
    return []


def _checked(read: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """Let a question be asked again, with the reason, when an answer is wrong."""

    def check(text: str) -> str | None:
        try:
            return read(text)
        except SpecError as error:
            raise click.UsageError("; ".join(problem.message for problem in error.problems)) from error
        except UsageError as error:
            raise click.UsageError(f"{error.message}; {error.hint}") from error

    return check


def _refuse_place(path: Path, *, force: bool) -> None:
    """Raises: UsageError: the spec cannot be written there."""
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no directory {path.parent}")
    if str(path) != "-" and path.exists() and not force:
        raise _exists(path)


def _exists(path: Path) -> UsageError:
    return UsageError(f"{path}: exists, and is left as it is", hint="give another path, or --force")


def with_script(text: str, script: str) -> str:
    """Write the script in place of the trainer, the last section of each template."""
    from clusterddp.spec.yamlfile import flow_yaml

    return _TRAIN.sub(lambda _: _ENTRY.format(script=flow_yaml(script)), text)


def without_given(text: str, files: Mapping[str, str]) -> str:
    """Turn the lines of keys that a shared file gives into comments with its name; `files`: dotted key -> the name."""
    given = dict(zip(files, files, strict=True))
    for key in _TOGETHER:
        given |= {other: key for other in _TOGETHER if key in files and other not in files}
    lines, section = list[str](), ""
    for line in text.splitlines():
        match = _KEY.match(line)
        if match is None:
            lines.append(line)
            continue
        section = section if match[1] else match[2]
        by = given.get(f"{section}.{match[2]}" if match[1] else section)
        was = f"{match[1] or ''}# {line.strip().partition(' #')[0].strip()}"
        lines.append(line if by is None else f"{was:<{_COMMENT_COLUMN}}# {files[by]} has {by}")
    return "\n".join(lines) + "\n"
