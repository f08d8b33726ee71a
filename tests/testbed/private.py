"""Hosts that share nothing: each node has a disk of its own, and of this machine sees the system alone."""

from __future__ import annotations

import os
import string
import sys
import uuid
from pathlib import Path

from tests.support.bare_python import base_interpreter, lay_out
from tests.testbed.plan import BARE, USER, RackPlan

HERE = Path(__file__).parent
HOMES = {"root": Path("/root"), USER: Path("/home", USER)}
DIRECTORIES = {
    "dev": 0o755,
    "etc": 0o755,
    "home": 0o755,
    "opt/bare": 0o755,
    "opt/rack/bin": 0o755,
    "proc": 0o755,
    "root": 0o700,
    "run": 0o755,
    "srv": 0o755,
    "sys": 0o755,
    "tmp": 0o1777,
    "usr": 0o755,
    "var/lib": 0o755,
    "var/log": 0o755,
    "var/tmp": 0o1777,
}
MERGED = ("bin", "lib", "lib32", "lib64", "libx32", "sbin")
"""Directories of the system that are links into /usr on some systems."""


def disk_of(directory: Path, node: str) -> Path:
    """Return where a node's disk lies on this machine."""
    return directory / "disk" / node


def outside(plan: RackPlan, directory: Path, node: str, path: Path) -> Path:
    """Return where a path of a node lies on this machine, be it on its disk or in a directory that it shares."""
    for number, (share, nodes) in enumerate(plan.shares.items()):
        if node in nodes and path.is_relative_to(share):
            return directory / "shares" / str(number) / path.relative_to(share)
    return disk_of(directory, node) / path.relative_to("/")


def write_private_files(plan: RackPlan, directory: Path) -> None:
    """Make the nodes' disks, their Python, and tables of what each host mounts when it starts."""
    packages = lay_out(directory / "bare", plan.python_packages)
    for place, package in packages.items():
        place.mkdir() if package.is_dir() else place.touch()
    mounts = [line(package, place, "bind,ro") for place, package in packages.items()]
    (directory / "nothing").mkdir()
    etc = directory / "etc"
    (etc / "fstab.head").write_text("".join(mounts))
    for number in range(len(plan.shares)):
        (directory / "shares" / str(number)).mkdir(parents=True)
    for node in plan.nodes:
        make_disk(disk_of(directory, node))
        for path in plan.shares:
            disk_of(directory, node).joinpath(Path(path).relative_to("/")).mkdir(parents=True, exist_ok=True)
        for user in HOMES:
            write_home(plan, directory, node, user)
        (etc / f"machine-id.{node}").write_text(f"{uuid.uuid4().hex}\n")
        (etc / f"fstab.{node}").write_text("".join(node_mounts(plan, directory, node)))
    template = string.Template((HERE / "sshd_config").read_text())
    config = template.substitute(authorized_keys=".ssh/authorized_keys")
    (etc / "sshd_config.private").write_text(f"{config}SetEnv PATH={plan.path(plan.nodes[0])}\n")
    users = [user.split(":") for user in (etc / "passwd").read_text().splitlines()]
    for user in users:
        user[5] = str(HOMES.get(user[0], user[5]))
    (etc / "passwd.private").write_text("".join(":".join(user) + "\n" for user in users))


def make_disk(disk: Path) -> None:
    """Make a root directory: what is to be mounted in it has its place, the rest belongs to the host."""
    for name, mode in DIRECTORIES.items():
        (disk / name).mkdir(parents=True)
        (disk / name).chmod(mode)
    (disk / "var/run").symlink_to("/run")
    for name in MERGED:
        if Path("/", name).is_symlink():
            (disk / name).symlink_to(Path("/", name).readlink())
        elif Path("/", name).is_dir():
            (disk / name).mkdir()


def write_home(plan: RackPlan, directory: Path, node: str, user: str) -> None:
    """Make a home of a user who can log in and has no key that leads anywhere else."""
    owner = (directory / "home" / user).stat()
    home = outside(plan, directory, node, HOMES[user])
    ssh = home / ".ssh"
    ssh.mkdir(parents=True, exist_ok=True)
    (ssh / "authorized_keys").write_text((directory / "etc/clientkey.pub").read_text())
    for path in (home, ssh, ssh / "authorized_keys"):
        os.chown(path, owner.st_uid, owner.st_gid)
    ssh.chmod(0o700)


def node_mounts(plan: RackPlan, directory: Path, node: str) -> list[str]:
    """List what a node sees of this machine, the system and the interpreter, and what replaces files in it."""
    disk, etc = disk_of(directory, node), directory / "etc"
    mounts = [line(Path("/dev"), disk / "dev", "rbind"), line(Path("/etc"), disk / "etc", "rbind,ro")]
    for name in ("usr", *MERGED):
        if not (disk / name).is_symlink() and (disk / name).is_dir():
            mounts.append(line(Path("/", name), disk / name, "rbind,ro"))
    files = {
        "passwd": etc / "passwd.private",
        "group": etc / "group",
        "hosts": etc / f"hosts.{node}",
        "nsswitch.conf": etc / "nsswitch.conf",
        "machine-id": etc / f"machine-id.{node}",
    }
    present = [name for name in files if Path("/etc", name).exists()]
    mounts += [line(files[name], disk / "etc" / name, "bind") for name in present]
    mounts.append(line(directory / "bare", below(disk, BARE), "rbind"))
    for number, (share, nodes) in enumerate(plan.shares.items()):
        if node in nodes:
            mounts.append(line(directory / "shares" / str(number), below(disk, Path(share)), "bind"))
    prefix = base_interpreter().parent.parent
    if not in_usr(prefix):
        for path in (prefix, *prefix.parents):
            place = outside(plan, directory, node, path)
            place.mkdir(parents=True, exist_ok=True)
            if path != prefix:  # every user gets through
                place.chmod(place.stat().st_mode | 0o111)
        mounts.append(line(prefix, below(disk, prefix), "rbind,ro"))
    return mounts + [line(directory / "nothing", below(disk, path), "bind,ro") for path in hidden() if in_usr(path)]


def in_usr(path: Path) -> bool:
    """Say whether a path is in the part of this machine that every node sees."""
    return path.is_relative_to("/usr")


def hidden() -> list[Path]:
    """List where clusterddp and the environment of the tests lie."""
    checkout = Path(__file__).resolve().parents[2]
    return [checkout] if sys.prefix == sys.base_prefix else [checkout, Path(sys.prefix)]


def below(disk: Path, path: Path) -> Path:
    """Return where a path of a node lies on this machine."""
    return disk / path.relative_to("/")


def line(source: Path, target: Path, options: str) -> str:
    """Write a line of an fstab."""
    places = (str(path).replace("\\", "\\134").replace(" ", "\\040") for path in (source, target))
    return f"{' '.join(places)} none {options} 0 0\n"
