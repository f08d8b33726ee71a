"""The command init: writes a commented spec to start from."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clusterddp.cli.arguments import HostName, collected, command
from clusterddp.cli.login import Node, ask_login, find_node, profile_option
from clusterddp.cli.terminal import Terminal, put, say, say_note
from clusterddp.errors import UsageError
from clusterddp.system.files import write_text
from clusterddp.system.templates import read_template

if TYPE_CHECKING:
    from clusterddp.spec.tree import Node as Value

_LAUNCHERS = click.Choice(["local", "ssh", "slurm"])
_NO_SCRIPT = "none"
_DISTRIBUTED = re.compile(
    r"\s*from torch\.distributed|\s*from torch import .*\bdistributed\b|\s*import (.*,\s*)?torch\.distributed"
)
_MAIN = re.compile(r"^if __name__ == [\"']__main__[\"']")
_MOST_BYTES = 1_000_000
_COMMENT_COLUMN = 30
_KEY = re.compile(r"(  )?([a-z_]+):(?= |$)")
_YOURS = re.compile(r"^# Your script;.*\n# entry: .*\n", re.MULTILINE)
_TRAIN = re.compile(r"\ntrain:.*\Z", re.MULTILINE | re.DOTALL)
_HOSTS = re.compile(r"^  hosts: .*$", re.MULTILINE)
_TOGETHER = ("resources.procs_per_node", "resources.gpus_per_node")
"""Keys of which one follows the other."""
_ENTRY = """\
entry:
  script: {script}
  # args: [--lr, 0.1, --out, "{{output_dir}}"]   # {{output_dir}}: a directory for the results of this run alone
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What options name; what is not named is the default."""

    launcher: str | None
    hosts: str | None
    partition: str | None
    script: str | None
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
@profile_option
@click.option("--force", is_flag=True, help="Overwrite PATH when it exists.")
@collected("answers", Answers)
@click.pass_obj
def init(terminal: Terminal, *, path: Path, answers: Answers, profile: str | None, force: bool) -> None:
    """Write a commented spec to PATH (job.yaml) to start from.

    What clusterddp.yaml or a site file gives is left out.

    With --launcher slurm, on a machine of the cluster or with a profile that has a login node, its values are the
    cluster's: partition, GPUs, cores, memory, time limit, account; notes explain what the cluster's settings mean for
    runs. A PATH of - is standard output.
    """
    from clusterddp.spec.load import read_shared_values

    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no directory {path.parent}")
    if str(path) != "-" and path.exists() and not force:
        raise _exists(path)
    answers = replace(answers, given=read_shared_values(terminal.environ, path))
    script, several = _choose_script(answers)
    text, notes = _first_spec(answers, script, terminal, profile)
    notes += [f"several scripts are here ({', '.join(several)}): --script names what the ranks run"] if several else []
    if str(path) == "-":
        put(text.rstrip("\n"))
    elif not write_text(path, text, exclusive=not force) and not force:
        raise _exists(path)
    else:
        say(f"wrote {path}: its ranks run {script or 'the built-in trainer'}")
    for note in notes:
        say_note(note)
    if str(path) != "-":
        name = shlex.quote(str(path))
        say(f"  check it  clusterddp submit {name} --dry-run")
        say(f"  run it    clusterddp submit {name} --follow")


COMMANDS = {"init": init}


def _first_spec(answers: Answers, script: str | None, terminal: Terminal, profile: str | None) -> tuple[str, list[str]]:
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
    if script is not None:  # the trainer is the last section of each template
        from clusterddp.spec.yamlfile import flow_yaml

        text = _YOURS.sub(lambda _: _ENTRY.format(script=flow_yaml(script)), _TRAIN.sub("", text))
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
    return "slurm" if has_slurm else "local"


def _fill_slurm(text: str, answers: Answers, terminal: Terminal, node: Node | None) -> tuple[str, list[str]]:
    from clusterddp.places.slurm.first_spec import slurm_spec

    partition = answers.partition or answers.given_text("slurm.partition")
    if node is not None:
        more = ["--partition", partition] if partition else []
        return ask_login(node, ["init", "--launcher", "slurm", "--script", _NO_SCRIPT, *more, "-"]).decode(), []
    try:
        return slurm_spec(text, terminal.environ, partition)
    except UsageError as error:
        if answers.partition is not None:
            raise
        raise UsageError(f"{answers.given['slurm.partition'].place.text}: {error.message}") from error


def _fill_hosts(text: str, answers: Answers) -> tuple[str, list[str]]:
    """Write the hosts of the options, or of ./hostfile, into a spec for SSH. Raises: SpecError: a host is wrong."""
    from clusterddp.spec.hosts import parse_hosts, read_hostfile
    from clusterddp.spec.load import load_spec
    from clusterddp.spec.yamlfile import flow_yaml

    hostfile = Path("hostfile")
    if answers.hosts is None and not hostfile.is_file():
        return text, ["the hosts in it are examples: name yours, or init --hosts gpu01,gpu02"]
    chosen = read_hostfile(hostfile) if answers.hosts is None else parse_hosts(answers.hosts)
    alone = load_spec("name: x\nlauncher: ssh\n", environ={}, hosts=chosen, whole=True)
    hosts = alone.job.model_dump(mode="json")["ssh"]["hosts"]
    written = flow_yaml([host if set(host) > {"host"} else host["host"] for host in hosts])
    return _HOSTS.sub(lambda _: f"  hosts: {written}", text, count=1), []


def _choose_script(answers: Answers) -> tuple[str | None, list[str]]:
    """Return the script that the ranks run, None: the built-in trainer; and the scripts that it may be, if several.

    Raises: UsageError: there is no such file.
    """
    if answers.script is None:
        # Those that import torch.distributed; without one, those that are programs.
        found = {path.name: _lines(path) for path in sorted(Path.cwd().glob("*.py"))}
        for pattern in (_DISTRIBUTED, _MAIN):
            if scripts := [name for name, lines in found.items() if any(map(pattern.match, lines))]:
                return (scripts[0], []) if len(scripts) == 1 else (None, scripts)
        return None, []
    if answers.script == _NO_SCRIPT:
        return None, []
    if not Path(answers.script).expanduser().is_file():
        raise UsageError(f"{answers.script}: there is no such file here", hint=f"{_NO_SCRIPT}: the built-in trainer")
    return answers.script, []


def _lines(path: Path) -> list[str]:
    try:
        if path.is_file() and path.stat().st_size <= _MOST_BYTES:
            return path.read_text(errors="replace").splitlines()
    except OSError:
        pass
    return []


def _exists(path: Path) -> UsageError:
    return UsageError(f"{path}: exists, and is left as it is", hint="give another path, or --force")


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
