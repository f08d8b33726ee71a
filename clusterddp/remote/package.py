"""What is sent to a host, which needs only Python: the constant command, the boot, this package as a zip file."""

from __future__ import annotations

import functools
import hashlib
import io
import zipfile
from pathlib import Path

import clusterddp
from clusterddp.remote.answers import ANSWERS, HELLO
from clusterddp.ssh.session import Package
from clusterddp.system.templates import list_templates, read_template

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
        hello=HELLO,
        answers=ANSWERS,
    )


def constant_command() -> str:
    """Return the command that every host runs, the same for all runs: one line, for any login shell."""
    lines = (line.strip() for line in read_template("ssh_host.sh").splitlines())
    text = " ".join(line for line in lines if line and not line.startswith("#"))
    assert not set("'!") & set(text)  # csh reads them otherwise
    return f"exec /bin/sh -c '{text}'"
