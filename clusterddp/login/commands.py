"""Commands on a login node: upload the spec and the code, then run the command with its streams and exit code."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import PreflightError, SshError, UsageError
from clusterddp.login.node import AT_LOGIN
from clusterddp.planning.program import absent_notes, plan_program
from clusterddp.remote.package import package
from clusterddp.remote.upload import UPLOAD_TIMEOUT_S, Uploader, Watch, upload_code
from clusterddp.run.code import SnapshotPlan, describe_commit
from clusterddp.ssh.command import Write, open_command
from clusterddp.ssh.session import HostAccess, Session
from clusterddp.ssh.sessions import open_sessions
from clusterddp.system.file_set import choose_files

if TYPE_CHECKING:
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.spec.model import JobSpec
    from clusterddp.spec.ssh_section import Login

SPEC, _CONFIG, _PROJECT, _SITE = "spec.yaml", "config.yaml", "project.yaml", "site.yaml"
"""Names of the files that are uploaded with a command."""
NEEDS = (
    "click>=8.1.7,<9",
    "platformdirs>=4.0,<5",
    "pydantic>=2.7,<3",
    "pydantic-core>=2.18,<3",
    "pyyaml>=6.0,<7",
    "rich>=13.0,<16",
    "submitit>=1.5.3,<1.6",
)
"""What the command imports there: the requirements of clusterddp without paramiko."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """The code that is uploaded with a submit."""

    snapshot: SnapshotPlan | None
    at: str
    """Its place in the tree on the login node."""
    within: str
    """The working directory of the command, in that tree."""
    working_dir: Path
    notes: tuple[str, ...] = ()
    """What is not uploaded."""


@dataclass(frozen=True, slots=True)
class SentFile:
    """An argument that names one of the uploaded files."""

    name: str


Argument = str | SentFile


@dataclass(frozen=True, kw_only=True, slots=True)
class LoginCommand:
    """A command for a login node."""

    arguments: Sequence[Argument]
    variables: Mapping[str, Argument] = field(default_factory=dict)
    code: Code | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    discard: bool = False
    """Remove its files when it has ended."""


def plan_command(
    resolved: ResolvedSpec,
    arguments: Sequence[Argument],
    variables: Mapping[str, Argument],
    *,
    runs_dir: Path,
    environ: Mapping[str, str],
    discard: bool,
) -> LoginCommand:
    """Plan a command that has read a spec here: the spec, what it is laid over and the code are uploaded with it.

    Raises: UsageError: the spec names paths that are not valid there.
    """
    from clusterddp.spec.layers import CONFIG_VARIABLE, PROJECT_VARIABLE, SITE_VARIABLE, config_path

    config, shared = config_path(environ), resolved.shared
    files = {SPEC: resolved.text, _CONFIG: config.read_text() if config else ""}
    named: dict[str, Argument] = {CONFIG_VARIABLE: SentFile(_CONFIG)}
    for file, variable, name in ((shared.project, PROJECT_VARIABLE, _PROJECT), (shared.site, SITE_VARIABLE, _SITE)):
        if file is not None:  # without a site file here, that of the login node holds there
            files[name] = file.text
            named[variable] = SentFile(name)
    return LoginCommand(
        arguments=arguments,
        variables={**variables, **named},
        code=plan_code(resolved.job, working_dir=Path.cwd(), runs_dir=runs_dir.absolute(), environ=environ),
        files=files,
        discard=discard,
    )


def plan_code(job: JobSpec, *, working_dir: Path, runs_dir: Path, environ: Mapping[str, str]) -> Code:
    """Choose the code that a job needs on the login node.

    Raises: UsageError: the spec names paths that are not valid there.
    """
    here = working_dir.resolve()
    _refuse_local_paths(job, here)
    if not job.snapshot and job.entry is not None:
        return Code(snapshot=None, at=".", within=".", working_dir=here)
    program = plan_program(job, working_dir=working_dir, runs_dir=runs_dir, environ=environ, uploads=True)
    snapshot = program.snapshot
    if snapshot is None:
        return Code(snapshot=None, at=".", within=".", working_dir=here)
    notes = (*snapshot.notes, *absent_notes(snapshot, uploads=True)) if job.entry else ()
    if here.is_relative_to(snapshot.root):
        within = str(here.relative_to(snapshot.root))
        return Code(snapshot=snapshot, at=".", within=within, working_dir=here, notes=notes)
    if not snapshot.root.is_relative_to(here):
        raise UsageError(
            f"entry.script lies in {snapshot.root}, outside of the directory that you submit from",
            hint="submit from the directory of the script, or from one above it",
        )
    at = str(snapshot.root.relative_to(here))
    return Code(snapshot=snapshot, at=at, within=".", working_dir=here, notes=notes)


def run_at_login(
    login: Login,
    login_command: LoginCommand,
    *,
    environ: Mapping[str, str],
    write_out: Write,
    write_err: Write,
    watch: Watch | None = None,
) -> int | None:
    """Run a command on a login node; return its exit code, None: the connection broke, and the command goes on.

    Raises: SshError: the host is not reached. PreflightError: it lacks what the command needs. OSError: its output
    cannot be written here.
    """
    access = HostAccess(
        host=login.host,
        python=login.python,
        venv=login.venv,
        conda=login.conda,
        modules=tuple(login.modules),
        root=login.dir,
        host_key=login.host_key,
    )
    agent = open_sessions([access], environ=environ, package=package())[login.host]
    if isinstance(agent, SshError):
        raise agent
    with agent:
        laid = _lay_out(agent, login_command, environ, watch) if login_command.files or login_command.code else {}
        with open_command(agent, access, package()) as command:
            answer = command.start(_order(login, login_command, laid))
            if answer["missing"]:
                raise _lacks(login, answer["python"], answer["missing"])
            return command.wait(agent, write_out, write_err)


def _order(login: Login, login_command: LoginCommand, laid: Mapping[str, str]) -> dict[str, Any]:
    """Write the order of a command for the agent on the login node; `laid`: where its code and files are."""
    place = laid.get("place", "")
    variables = {name: _spell(argument, place) for name, argument in login_command.variables.items()}
    return {
        "module": "clusterddp",
        "arguments": [_spell(argument, place) for argument in login_command.arguments],
        "variables": variables | {AT_LOGIN: login.host},
        "needs": NEEDS,
        "directory": laid.get("directory"),
        "runs_dir": login.runs_dir,
        "discard": place if login_command.discard and place else None,
    }


def _lay_out(
    agent: Session, login_command: LoginCommand, environ: Mapping[str, str], watch: Watch | None
) -> dict[str, str]:
    """Upload the code and the files to the login node; return their place."""
    code = login_command.code
    snapshot = code.snapshot if code else None
    digest = None
    if snapshot:
        files = choose_files(snapshot.root, snapshot.files)
        digest = files.digest()
        upload_code(Uploader(sessions={agent.host: agent}, watch=watch), digest, lambda: files)
    facts = {
        "sum": digest,
        "at": code.at if code else ".",
        "within": code.within if code else ".",
        "files": dict(login_command.files),
        "git": describe_commit(code.working_dir, environ) if code else None,
    }
    return agent.ask("login.lay_out", facts, timeout_s=UPLOAD_TIMEOUT_S).facts


def _spell(argument: Argument, place: str) -> str:
    return argument if isinstance(argument, str) else f"{place}/{argument.name}"


def _refuse_local_paths(job: JobSpec, here: Path) -> None:
    """Refuse paths of this machine, which would name another file, or none, on the login node."""
    data_dir = job.train.data_dir if job.train else None
    if data_dir is not None and not data_dir.startswith(("/", "~")):
        raise UsageError(
            f'train.data_dir: found "{data_dir}", expected a path on the cluster, from / or ~/',
            hint="the job starts on the login node of the profile, which does not see the files of this machine",
        )
    script = job.entry.script if job.entry else None
    if script is not None and job.snapshot and script.startswith(("/", "~")):
        raise UsageError(
            f'entry.script: found "{script}", expected a path from the directory that you submit from',
            hint="its code is sent to the login node; snapshot: false takes a script that lies there",
        )


def _lacks(login: Login, python: str, missing: Sequence[str]) -> PreflightError:
    command = f"{shlex.quote(python)} -m pip install {' '.join(shlex.quote(each) for each in missing)}"
    return PreflightError(
        f"{login.host}: {python} there lacks {', '.join(missing)}, without which no job is submitted",
        hint=f"there: {command}; or python, venv, conda or modules of the profile's login name another Python",
    )
