"""The first program on a host: it reports the host's facts, receives this package if it is not there, starts the agent.

The host's own Python runs this text, which comes over the connection behind that of system/own_directory.py; it may be
an old one and has no clusterddp yet.
Standard input brings one line of JSON, `{"package": sha256, "root": str, "safe": str, "patience_s": int,
"login": object}` (`safe`: see own_directory.py; with `login`, login.py runs a command in place of the agent; it and
`patience_s` are optional); and, after an answer with `"have": false`, one line `{"size": n}` and n bytes, the package
as a zip file.
"""

import hashlib
import io
import json
import os
import socket
import sys

MARK = "clusterddp-agent "
"""Begins every line of this program: a login shell may print lines of its own before."""


def main():
    """Receive the package, then become the agent."""
    stdin = sys.stdin.buffer
    order = json.loads(stdin.readline())
    try:
        os.environ[SAFE_DIRECTORIES] = order.get("safe", "")
        root = open_root(order["root"])
        package = os.path.join(root, "packages", order["package"])
        have = os.path.isdir(package)
        say(dict(facts(root), ok=True, have=have))
        if not have:
            size = int(json.loads(stdin.readline())["size"])
            install(stdin.read(size), order["package"], package)
            say({"ok": True})
    except Exception as error:
        say(
            {
                "ok": False,
                "error": str(error) if isinstance(error, RefusalError) else "%s: %s" % (type(error).__name__, error),
            }
        )
        return
    sys.path.insert(0, package)
    if "login" in order:
        from clusterddp.places.ssh.agent import login

        login.run(root, package, order["login"])
    from clusterddp.places.ssh.agent.main import serve

    serve(root, package, order.get("patience_s", 600))


class RefusalError(Exception):
    """Its text is printed for the user as it is."""


def open_root(named):
    """Return the directory of all files of clusterddp; make it if it is not there."""
    if sys.version_info < (3, 10):
        raise RefusalError(f"{sys.executable} is Python {sys.version.split()[0]}, 3.10 or newer is needed")
    root = os.path.abspath(os.path.expanduser(named))
    os.makedirs(root, mode=0o700, exist_ok=True)
    fault = find_fault(root, private=True, instead="ssh.dir names one of your directories")
    if fault is not None:
        raise RefusalError("%s; %s" % fault)
    for name in ("packages", "code", "runs"):
        os.makedirs(os.path.join(root, name), mode=0o700, exist_ok=True)
    return root


def facts(root):
    """Return the facts of this host, user and Python."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot_id = file.read().strip()
    except OSError:
        boot_id = ""
    return {
        "hostname": socket.gethostname(),
        "uid": os.getuid(),
        "user": os.environ.get("USER", ""),
        "home": os.path.expanduser("~"),
        "root": root,
        "python": sys.executable,
        "path": os.environ.get("PATH", ""),
        "version": sys.version.split()[0],
        "platform": sys.platform,
        "boot_id": boot_id,
        "pid": os.getpid(),
    }


def install(data, wanted, package):
    """Unpack the package beside its place, and rename it there; another agent may do the same now."""
    import shutil  # these three: most launchers find the package here
    import tempfile
    import zipfile

    found = hashlib.sha256(data).hexdigest()
    if found != wanted:
        raise RefusalError(f"the package has the sum {found[:12]}, expected {wanted[:12]}")
    staging = tempfile.mkdtemp(prefix=".package-", dir=os.path.dirname(package))
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            archive.extractall(staging)
        os.rename(staging, package)
    except OSError:
        if not os.path.isdir(package):
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def say(words):
    """Write one line of JSON."""
    sys.stdout.write(MARK + json.dumps(words) + "\n")
    sys.stdout.flush()


main()
