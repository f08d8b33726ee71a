"""What a rack has on disk: the configuration of its daemons, users, keys and fake devices."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import string
import subprocess
from pathlib import Path

from tests.testbed.confinement import CGROUPS, CONTROLLERS, NVIDIA_MAJOR, cgroup_conf, write_confinement
from tests.testbed.plan import HEAD, SYSTEM_PATH, USER, USER_ID, RackPlan
from tests.testbed.private import write_private_files

HERE = Path(__file__).parent
FREEZER = CGROUPS / "freezer"
"""The controller with which Slurm signals and suspends the processes of a step."""
CGROUP_CONF = "CgroupMountpoint=/sys/fs/cgroup\n"
ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=head
AccountingStorageTRES=gres/gpu"""
SLURMDBD_CONF = """\
DbdHost=head
SlurmUser=root
AuthType=auth/munge
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
PidFile=/run/slurmdbd.pid
LogFile={directory}/log/slurmdbd
"""


def write_rack_files(plan: RackPlan, directory: Path) -> None:
    """Fill a rack's directory with everything that its hosts read when they start."""
    directory.chmod(0o755)
    for name in ("dev", "etc/slurm", "home", "pid", "proc", "shared", "state"):
        (directory / name).mkdir(parents=True)
    (directory / "shared").chmod(0o1777)
    etc = directory / "etc"
    switches = {name: getattr(plan, name) for name in ("slurm", "docker", "private_hosts", "configless")}
    controllers = ["freezer"] * tracks_by_cgroup(plan) + list(CONTROLLERS) * plan.confine
    lines = [f"{name}={'yes' * value}\n" for name, value in switches.items()]
    (etc / "switches").write_text("".join([*lines, f"controllers='{' '.join(controllers)}'\n"]))
    write_users(directory)
    if plan.slurm:
        (etc / "munge.key").write_bytes(secrets.token_bytes(128))
        (etc / "munge.key").chmod(0o600)
        write_slurm_conf(plan, directory)
    for host in plan.hosts:
        (etc / f"hosts.{host}").write_text(host_table(plan, host))
    (etc / "nsswitch.conf").write_text(name_services(Path("/etc/nsswitch.conf").read_text()))
    write_keys(plan, directory)
    if plan.private_hosts:
        write_private_files(plan, directory)


def host_table(plan: RackPlan, own: str) -> str:
    """Write /etc/hosts of one host."""
    lines = ["127.0.0.1 localhost"]
    if plan.debian_hosts:
        lines.append(f"127.0.1.1 {own}")
    lines += [f"{plan.address(host)} {host}" for host in plan.hosts if not (plan.debian_hosts and host == own)]
    return "\n".join(lines) + "\n"


def name_services(of_this_machine: str) -> str:
    """Let names of hosts come from /etc/hosts alone: who asks a DNS that cannot be reached waits for 10 s each time."""
    return re.sub(r"^hosts:.*$", "hosts: files", of_this_machine, flags=re.MULTILINE)


def write_users(directory: Path) -> None:
    """Copy the users of this machine, add one without privileges, and give root a home in the rack.

    ssh looks for its files in the home that passwd names: those of the person who runs the rack are never touched.
    """
    users = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
    for user in users:
        if user[0] == "root":
            user[5] = str(directory / "home" / "root")
    users.append([USER, "*", str(USER_ID), str(USER_ID), "", str(directory / "home" / USER), "/bin/bash"])
    (directory / "etc/passwd").write_text("".join(":".join(user) + "\n" for user in users))
    groups = Path("/etc/group").read_text()
    (directory / "etc/group").write_text(f"{groups}{USER}:x:{USER_ID}:\n")


def tracks_by_cgroup(plan: RackPlan) -> bool:
    """Say whether Slurm keeps each step in a cgroup of the freezer."""
    return plan.slurm and plan.tracking == "cgroup" and FREEZER.joinpath("cgroup.procs").exists()


def write_slurm_conf(plan: RackPlan, directory: Path) -> None:
    """Write slurm.conf and gres.conf and make the character devices that pose as GPUs."""
    values = {
        "dir": directory,
        "head_address": plan.address(HEAD),
        "cores_per_socket": plan.cores_per_host // 2,
        "memory_mb": plan.memory_mb,
        "gpus": f"Gres=gpu:{plan.gpus_per_host}" if plan.gpus_per_host else "",
        "kill_wait_s": plan.kill_wait_s,
        "min_job_age_s": plan.min_job_age_s,
        "first_job_id": plan.first_job_id,
        "slurmd_timeout_s": plan.slurmd_timeout_s,
        "requeue_wait_s": plan.requeue_wait_s,
        "preempt_grace_s": plan.preempt_grace_s,
        "job_requeue": int(plan.job_requeue),
        "tracking": "cgroup" if tracks_by_cgroup(plan) else "linuxproc",
        "task_plugin": "task/cgroup,task/affinity" if plan.confine else "task/none",
        "more": more_settings(plan, directory),
        "accounting": ACCOUNTING if plan.accounting else "",
        "nodes": "\n".join(node_line(plan, node) for node in plan.nodes),
    }
    template = string.Template((HERE / "slurm.conf").read_text())
    limits = cgroup_conf(plan) if plan.confine else ""
    (directory / "etc/slurm/cgroup.conf").write_text(CGROUP_CONF + cgroup_plugin() + limits)
    (directory / "etc/slurm/slurm.conf").write_text(template.substitute(values))
    if plan.accounting:
        dbd_conf = directory / "etc/slurm/slurmdbd.conf"
        dbd_conf.write_text(SLURMDBD_CONF.format(directory=directory))
        dbd_conf.chmod(0o600)
    devices = [directory / "dev" / f"nvidia{index}" for index in range(plan.gpus_per_host)]
    for index, device in enumerate(devices):
        # Else the numbers of /dev/null: opening it does no harm.
        number = os.makedev(NVIDIA_MAJOR, index) if plan.confine else os.makedev(1, 3)
        os.mknod(device, 0o666 | stat.S_IFCHR, number)
    lines = [
        f"NodeName={node} Name=gpu File={device}\n"
        for node in plan.nodes
        for device in devices[: plan.gpus_of.get(node)]
    ]
    (directory / "etc/slurm/gres.conf").write_text("AutoDetect=off\n" + "".join(lines))


def node_line(plan: RackPlan, node: str) -> str:
    """Return the line of slurm.conf for a node."""
    own = f" Gres=gpu:{plan.gpus_of[node]}" if node in plan.gpus_of else ""
    return f"NodeName={node} NodeAddr={plan.address(node)}{own}"


def cgroup_plugin() -> str:
    """Name the version of cgroups, which Slurm 20.11 takes from no setting."""
    return "CgroupPlugin=cgroup/v1\n" if slurm_year() > 20 else ""


def has_own_tmp() -> bool:
    """Say whether a confined job has a /tmp of its own: Slurm 20.11 lacks job_container/tmpfs."""
    return slurm_year() > 20


def slurm_year() -> int:
    """Return the first number of the version of Slurm that is here."""
    argv = [shutil.which("slurmctld", path=SYSTEM_PATH) or "slurmctld", "-V"]
    return int(subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()[-1].split(".")[0])


def more_settings(plan: RackPlan, directory: Path) -> str:
    """Return the lines of slurm.conf for what not every rack has."""
    lines = [write_confinement(directory, own_tmp=has_own_tmp())] if plan.confine else []
    lines += ["SlurmctldParameters=enable_configless"] * plan.configless
    lines += ["AccountingStorageEnforce=associations,limits"] * (plan.confine and plan.accounting)
    return "\n".join(lines)


def write_keys(plan: RackPlan, directory: Path) -> None:
    """Make a host key per host and one client key, and homes in which ssh to every host works and checks host keys."""
    etc = directory / "etc"
    template = string.Template((HERE / "sshd_config").read_text())
    (etc / "sshd_config").write_text(template.substitute(authorized_keys=f"{directory}/home/%u/.ssh/authorized_keys"))
    known_hosts = ""
    for host in plan.hosts:
        public_key = make_key(etc / f"hostkey.{host}")
        known_hosts += f"{host},{plan.address(host)} {public_key}"
    public_key = make_key(etc / "clientkey")
    for user, number in (("root", 0), (USER, USER_ID)):
        ssh = directory / "home" / user / ".ssh"
        ssh.mkdir(parents=True)
        (ssh / "known_hosts").write_text(known_hosts)
        (ssh / "authorized_keys").write_text(public_key)
        (ssh / "id_ed25519").touch(0o600)
        (ssh / "id_ed25519").write_bytes((etc / "clientkey").read_bytes())
        (ssh / "config").write_text("StrictHostKeyChecking yes\nBatchMode yes\nConnectTimeout 5\n")
        for path in (ssh.parent, ssh, *ssh.iterdir()):
            os.chown(path, number, number)


def make_key(path: Path) -> str:
    """Make a key pair and give its public half as a line."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "rack", "-f", str(path)], check=True)
    return path.with_name(f"{path.name}.pub").read_text()
