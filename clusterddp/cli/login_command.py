"""Commands on a login node by the user's own ssh, with the code as one archive on its standard input.

So a ControlMaster, second factors, Kerberos and FIDO keys work as they do for `ssh HOST`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from clusterddp.cli.login import AT_LOGIN
from clusterddp.errors import NonsenseError, PreflightError, SshError, UsageError
from clusterddp.places.ssh.session import MARK, MAX_PREFACE_BYTES, NO_PACKAGE, greeting, package, ssh_argv
from clusterddp.planning.program import absent_notes, plan_program, refuse_by_files
from clusterddp.planning.ssh import SshNode, constant_command
from clusterddp.run.code import SnapshotPlan, describe_commit
from clusterddp.spec.layers import CONFIG_VARIABLE, PROJECT_VARIABLE, SITE_VARIABLE, config_path
from clusterddp.system.archive import Archive
from clusterddp.system.file_set import choose_files
from clusterddp.wire import build, read_object

if TYPE_CHECKING:
    from clusterddp.spec.hosts import Login
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.spec.model import JobSpec

SPEC, _CONFIG, _PROJECT, _SITE = "spec.yaml", "config.yaml", "project.yaml", "site.yaml"
"""Names of the files that are uploaded with a command."""
NEEDS = (
    "click>=8.1.7,<9",
    "cloudpickle>=3,<4",
    "platformdirs>=4.0,<5",
    "pydantic>=2.7,<3",
    "pydantic-core>=2.18,<3",
    "pyyaml>=6.0,<7",
    "rich>=13.0,<16",
    "submitit>=1.5.3,<1.6",
)
"""What the command imports there: the requirements of clusterddp without paramiko."""
_LARGE_UPLOAD_BYTES = 5_000_000
"""From this size on an upload is worth a line."""
_SSH_FAILED = 255
_LET_IT_ASK = (
    "type `ssh {host}`, which shows why; where it asks for a password or a code, the lines `ControlMaster auto`, "
    "`ControlPath ~/.ssh/%C`, `ControlPersist 8h` below `Host {host}` in ~/.ssh/config keep that login open"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """The code that is uploaded with a submit."""

    snapshot: SnapshotPlan | None
    at: str
    """Its place in the tree on the login node."""
    within: str
    """The working directory of the command, in that tree."""
    working_dir: Path
    import_paths: tuple[str, ...] = ()
    """The directories of the code from which its packages are imported here, relative to its root."""
    notes: tuple[str, ...] = ()
    """What is not uploaded."""


Argument = str | dict[str, str]
"""`{"file": name}` stands for the path of one of the uploaded files."""


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

    Raises: UsageError: the spec names paths that are not valid there. SpecError: its script or a secret is not here.
    """
    refuse_by_files(resolved, working_dir=Path.cwd(), environ=environ)
    config, shared = config_path(environ), resolved.shared
    files = {SPEC: resolved.text, _CONFIG: config.read_text() if config else ""}
    named: dict[str, Argument] = {CONFIG_VARIABLE: {"file": _CONFIG}}
    for file, variable, name in ((shared.project, PROJECT_VARIABLE, _PROJECT), (shared.site, SITE_VARIABLE, _SITE)):
        if file is not None:  # without a site file here, that of the login node holds there
            files[name] = file.text
            named[variable] = {"file": name}
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
    paths = tuple(os.path.relpath(path, snapshot.root) for path in program.import_paths)
    code = Code(snapshot=snapshot, at=".", within=".", working_dir=here, import_paths=paths, notes=notes)
    if here.is_relative_to(snapshot.root):
        return replace(code, within=str(here.relative_to(snapshot.root)))
    if not snapshot.root.is_relative_to(here):
        raise UsageError(
            f"entry.script is in {snapshot.root}, outside of the directory that you submit from",
            hint="submit from the directory of the script, or from one above it",
        )
    return replace(code, at=str(snapshot.root.relative_to(here)))


def run_at_login(
    login: Login,
    login_command: LoginCommand,
    *,
    environ: Mapping[str, str],
    write_out: Callable[[bytes], object],
    report: Callable[[str], object] = lambda _: None,
) -> int | None:
    """Run a command on a login node by the user's own ssh; return its exit code, None: the connection broke.

    ssh asks on the terminal what it has to, and what it and the command write to standard error appears there.
    Raises: SshError: ssh did not log in, or the node's Python did not start. PreflightError: it lacks what the command
    needs. OSError: the command's output cannot be written here.
    """
    code = login_command.code
    snapshot = code.snapshot if code else None
    archive = Archive(files=choose_files(snapshot.root, snapshot.files)) if snapshot else None
    order = {
        "arguments": login_command.arguments,
        "variables": {**login_command.variables, AT_LOGIN: login.host},
        "runs_dir": login.runs_dir,
        "needs": NEEDS,
        "files": dict(login_command.files),
        "code": code
        and {
            "sum": archive.files.digest() if archive else None,
            "at": code.at,
            "within": code.within,
            "git": describe_commit(code.working_dir, environ),
            "import_paths": code.import_paths,
        },
        "discard": login_command.discard,
    }
    with _ssh(login, environ) as ssh:
        if not ssh.begin(login, order):
            ssh.send({"size": len(package().data)}, [package().data])
            ssh.read_answer({})
        answer = ssh.read_answer({"missing": list[str], "python": str, "send": bool})
        if answer["missing"]:
            python, missing = answer["python"], answer["missing"]
            command = f"{shlex.quote(python)} -m pip install {' '.join(map(shlex.quote, missing))}"
            raise PreflightError(
                f"{login.host}: {python} there lacks {', '.join(missing)}, without which no job is submitted",
                hint=f"there: {command}; or python, venv, conda or modules of the profile's login name another Python",
            )
        if archive and answer["send"]:
            if archive.size >= _LARGE_UPLOAD_BYTES:
                report(f"sending {archive.size / 1e6:.1f} MB to {login.host}")
            ssh.send({"size": archive.size}, archive.chunks())
            ssh.read_answer({})
        exit_code = ssh.pass_on(write_out)
    return None if exit_code == _SSH_FAILED else exit_code


def exec_at_login(login: Login, words: Sequence[str], *, environ: Mapping[str, str]) -> int:
    """Run a command that reads standard input, and has a terminal if that is one; return its exit code.

    Raises: as `run_at_login`.
    """
    variables = json.dumps({AT_LOGIN: login.host, CONFIG_VARIABLE: ""})
    terminal = os.isatty(0)
    arguments = [login.runs_dir, variables, *words]
    argv = ssh_argv(_node(login), "clusterddp.places.ssh.agent.login", arguments, terminal=terminal)
    # ssh reads ahead: what is piped into one that finds no package would be lost for the next.
    code = subprocess.call(argv, env=dict(environ)) if terminal else NO_PACKAGE
    if code != NO_PACKAGE:
        return code
    upload = LoginCommand(arguments=["--version"])
    failed = run_at_login(login, upload, environ=environ, write_out=lambda _: None)
    return failed or subprocess.call(argv, env=dict(environ))


@dataclass(kw_only=True)
class _Ssh:
    """A running ssh to a login node."""

    host: str
    process: subprocess.Popen[bytes]

    def begin(self, login: Login, order: Mapping[str, Any]) -> bool:
        """Send the boot and the order; return whether the package is there."""
        self._write(greeting(_node(login), login=order))
        return bool(self.read_answer({"have": bool})["have"])

    def send(self, message: Mapping[str, Any], chunks: Iterable[bytes]) -> None:
        self._write(json.dumps(message).encode() + b"\n")
        for chunk in chunks:
            self._write(chunk)

    def read_answer(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Read an answer, which holds these keys; skip what a login shell prints.

        Raises: SshError.
        """
        assert self.process.stdout is not None
        skipped = 0
        while line := self.process.stdout.readline(MAX_PREFACE_BYTES):
            if not line.startswith(MARK):
                skipped += len(line)
                if skipped > MAX_PREFACE_BYTES:
                    raise NonsenseError(self.host, f"its login shell printed more than {MAX_PREFACE_BYTES:,} bytes")
                continue
            try:
                answer = read_object(line.removeprefix(MARK))
                if answer.pop("ok", False):
                    return build(keys, answer, "answer")  # type: ignore[no-any-return]
            except ValueError as error:
                raise NonsenseError(self.host, str(error)) from error
            hint = answer.get("hint")
            raise SshError(self.host, "ask", str(answer.get("error")), hint=hint if isinstance(hint, str) else None)
        code = self.process.wait()
        if code == _SSH_FAILED:
            raise SshError(self.host, "connect", "ssh did not log in", hint=_LET_IT_ASK.format(host=self.host))
        hint = "python, venv, conda or modules of the profile's login choose the Python there"
        raise SshError(self.host, "start", f"the Python there did not start (exit code {code})", hint=hint)

    def pass_on(self, write_out: Callable[[bytes], object]) -> int:
        """Pass on the command's output until it has ended; the first Ctrl-C goes to it, the second one ends this."""
        assert self.process.stdout is not None
        output = cast("io.BufferedReader", self.process.stdout)
        interrupted = False
        while True:
            try:
                if not (data := output.read1()):
                    return self.process.wait()
                write_out(data)
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                self._write(b"\n")

    def _write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ssh has ended; `read_answer` says why
            self.process.stdin.write(data)
            self.process.stdin.flush()


@contextlib.contextmanager
def _ssh(login: Login, environ: Mapping[str, str]) -> Iterator[_Ssh]:
    """Start ssh with the constant command; end it with this block."""
    argv = ["ssh", "-T", "-o", "RemoteCommand=none", "--", login.host, constant_command()]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # ssh keeps that: Ctrl-C goes to the command, not to ssh
    try:
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(environ))
    except FileNotFoundError as error:
        raise SshError(login.host, "connect", "there is no ssh on PATH", hint="install OpenSSH's client") from error
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        yield _Ssh(host=login.host, process=process)
    finally:
        process.terminate()
        process.wait()


def _node(login: Login) -> SshNode:
    return SshNode(
        host=login.host,
        python=login.python,
        venv=login.venv,
        conda=login.conda,
        modules=tuple(login.modules),
        root=login.dir,
    )


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
            hint="its code is sent to the login node; snapshot: false takes a script that is there",
        )
