"""Clusters that were not at hand: commands on PATH that print what tests/clusters/ holds."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.paths import CLUSTERS

_SCONTROL = """\
#!/bin/sh
case "$2" in
config) cat "$0.config";;
partition) cat "$0.partitions";;
*) exit 1;;
esac
"""
_SACCTMGR = """\
#!/bin/sh
if ! [ -e "$0.associations" ]; then echo "You are not running a supported accounting_storage plugin" >&2; exit 1; fi
case "$3" in
assoc) cat "$0.associations";;
user) cat "$0.default_account";;
esac
"""
_SINFO = '#!/bin/sh\ncat "$0.sinfo"\n'
_SACCT = "#!/bin/sh\n"


def fake_commands(cluster: str, directory: Path) -> dict[str, str]:
    """Make the commands of a cluster in `directory`; return the environment in which they are found."""
    directory.mkdir()
    for name, text in {"scontrol": _SCONTROL, "sacctmgr": _SACCTMGR, "sinfo": _SINFO, "sacct": _SACCT}.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
        for answer in (CLUSTERS / cluster).iterdir():
            (directory / f"{name}.{answer.name}").symlink_to(answer)
    system = "/usr/bin:/bin"
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM")} | {
        "PATH": f"{directory}:{system}"
    }
