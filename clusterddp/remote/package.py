"""What is sent to a host, which needs only Python: the constant command, the boot, this package as a zip file."""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

import clusterddp
from clusterddp.remote.session import HostAccess, Package
from clusterddp.system.templates import list_templates, read_template

NO_PACKAGE = 86
"""The exit code of `ssh_argv` where the host does not have the package."""
_READS = "IFS= read -r python && IFS= read -r venv && IFS= read -r conda && IFS= read -r modules || exit 96; "
_RUNS = '"import sys; exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"\''
"""What the constant command does with standard input, at its beginning and at its end."""
_LONG_AGO = (1980, 1, 1, 0, 0, 0)


@functools.cache
def package() -> Package:
    """Return what is uploaded; the same sources give the same checksum."""
    home = Path(clusterddp.__file__).parent
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        sources = [path for pattern in ("*.py", "*.css", "*.js") for path in sorted(home.rglob(pattern))]
        names = {path: path.relative_to(home).as_posix() for path in sources}
        names |= {path: f"templates/{path.name}" for path in list_templates()}  # submits on a login node need them
        for path, name in names.items():
            info = zipfile.ZipInfo(f"clusterddp/{name}", date_time=_LONG_AGO)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, path.read_bytes())
    data = buffer.getvalue()
    return Package(
        command=constant_command(),
        boot=(home / "agent" / "boot.py").read_bytes(),
        sha256=hashlib.sha256(data).hexdigest(),
        data=data,
    )


def constant_command() -> str:
    """Return the command that every host runs, the same for all runs: one line, for any login shell."""
    lines = (line.strip() for line in read_template("ssh_host.sh").splitlines())
    text = " ".join(line for line in lines if line and not line.startswith("#"))
    assert not set("'!") & set(text)  # csh reads them otherwise
    return f"exec /bin/sh -c '{text}'"


def ssh_argv(access: HostAccess, module: str, arguments: Sequence[str], *, terminal: bool) -> list[str]:
    """Return the user's own ssh, which runs a module of the package on a host; see `NO_PACKAGE`.

    It leaves standard input to the module: what the constant command reads from there is a part of it. `module` has a
    function `main(arguments)`; one that begins with ~/ is in the home directory there.
    """
    home = f"{access.root}/packages/{package().sha256}"
    program = (
        "import sys, os\n"
        f"home = os.path.expanduser({home!r})\n"
        f"os.path.isdir(home) or sys.exit({NO_PACKAGE})\n"
        "sys.path.insert(0, home)\n"
        f"from {module} import main\n"
        f"main([os.path.expanduser({arguments[0]!r}), *{list(arguments[1:])!r}])\n"
    )
    values = {"python": access.python, "venv": access.venv, "conda": access.conda, "modules": " ".join(access.modules)}
    # printf reads each character that a shell might as its number.
    given = "".join(f"{name}=$(printf {_numbered(value or '')}); " for name, value in values.items())
    body = constant_command().removesuffix(_RUNS).partition(_READS)[2]
    code = base64.b64encode(program.encode()).decode()
    command = f"exec /bin/sh -c '{given}{body}\"import base64, sys; exec(base64.b64decode(sys.argv.pop()))\" {code}'"
    options = ["-t" if terminal else "-T", "-o", "RemoteCommand=none"]
    return ["ssh", *options, "--", access.host, command]


def _numbered(text: str) -> str:
    """Write a text as the argument of printf in a command for any login shell."""
    return '"' + "".join(f"\\{byte:03o}" for byte in text.encode()) + '"'
