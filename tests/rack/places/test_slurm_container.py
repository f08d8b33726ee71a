"""A run in a container on a real Slurm; pyxis itself was not at hand: a stand-in for it does what its sources do.

The stand-in is a `srun` before the real one. It takes the --container options off, mounts the package as they say, lets
the image's variables beat the job's, and hides what only the host has: scontrol, and the Python of the host.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from clusterddp.run.directory import RunDir
from clusterddp.run.record import StartedPython, read_start
from clusterddp.system.files import read_json
from tests.support.slurm_runs import START, await_final_end, environment, make_slurm_run
from tests.testbed.plan import HEAD
from tests.testbed.rack import Rack

VERSION = sys.version.split()[0]
pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]
SRUN = """#!/bin/sh
# Takes pyxis' options off, and puts the container around the task's command.
around=
for word; do
    shift
    case $around$word in
        --container-mounts=*) mounts=${word#*=} ;;
        --container-* | --no-container-*) ;;
        -* | inside*) set -- "$@" "$word" ;;
        *) set -- "$@" unshare --mount /bin/sh "$(dirname "$0")/container" "$mounts" "$word"; around=inside ;;
    esac
done
exec /usr/bin/srun "$@"
"""
CONTAINER = f"""#!/bin/sh
mounts=$1; shift
mount -t tmpfs none /opt
mkdir -p /opt/image/bin /opt/image/lib /opt/clusterddp/clusterddp
IFS=,
for mount in $mounts; do
    case $mount in *:/opt/clusterddp/clusterddp:ro) mount --bind "${{mount%%:*}}" /opt/clusterddp/clusterddp ;; esac
done
printf '#!/bin/sh\\nexec %s "$@"\\n' {sys.base_prefix}/bin/python3 >/opt/image/bin/python3
chmod 755 /opt/image/bin/python3
mkdir /opt/image/own
ln -s {sys.base_prefix}/bin/python3 /opt/image/own/python
mount --bind /opt/image/lib /etc/slurm
mount --bind /dev/null "$(readlink -f /usr/bin/scontrol)"
# The image's variables beat the job's: https://github.com/NVIDIA/pyxis, environment of the container.
export PYTHONPATH=/opt/image/lib PATH=/opt/image/bin:/usr/bin:/bin LD_LIBRARY_PATH=
exec "$@"
"""
PROGRAM = """
import json, os, sys, clusterddp
print(json.dumps({"package": clusterddp.__file__, "path": os.environ["PYTHONPATH"],
                  "python": os.environ["PATH"].split(":")[0], "end": os.environ.get("SLURM_JOB_END_TIME"),
                  "executable": sys.executable, "variable": os.environ.get("OF_THE_SETUP")}))
"""


def make_place(rack: Rack, name: str) -> Path:
    """Make the directory of a user with the stand-in and the program."""
    place = rack.dir / "shared" / name
    place.mkdir()
    for tool, text in (("srun", SRUN), ("container", CONTAINER)):
        (place / tool).write_text(text)
        (place / tool).chmod(0o755)
    (place / "entry.py").write_text(PROGRAM)
    return place


def run_contained(rack: Rack, place: Path, more: str) -> RunDir:
    """Run the program in the container, with these lines in its spec, to its end."""
    spec = f'name: job\nentry: {{script: entry.py}}\nlauncher: slurm\nresources: {{nodes: 2, time: "10"}}\n{more}'
    run = make_slurm_run(rack, place.name, text=spec)
    environ = environment()
    environ["PATH"] = f"{place}:{environ['PATH']}"
    rack.run(HEAD, [sys.executable, "-c", START, str(run.path)], env=environ)
    assert await_final_end(run).outcome == "COMPLETED", (run.launcher_dir / "tasks.log").read_text()
    return run


@pytest.mark.parametrize("python", ["python3", "/opt/image/bin/python3"])
def test_the_package_and_python_of_the_image_are_found_though_the_host_lacks_them(rack: Rack, python: str) -> None:
    place = make_place(rack, f"pyxis-{Path(python).is_absolute()}")
    run = run_contained(rack, place, f"container: {{image: torch.sqsh}}\npython: {python}\n")
    for rank in range(2):
        printed = json.loads(run.attempt(0).stdout(rank).read_text())
        assert printed["package"] == "/opt/clusterddp/clusterddp/__init__.py"
        assert printed["path"] == "/opt/clusterddp:/opt/image/lib"
        assert printed["python"] == "/opt/image/bin"
    assert ends_in_ten_minutes(run, int(printed["end"]))


def test_setup_lines_run_inside_the_container_and_choose_a_python_of_the_image(rack: Rack) -> None:
    place = make_place(rack, "pyxis-setup")
    lines = ["export OF_THE_SETUP=$(ls -d /opt/image/lib)", "export PATH=/opt/image/own:$PATH"]
    run = run_contained(rack, place, f"container: {{image: torch.sqsh}}\nsetup: {json.dumps(lines)}\n")
    for rank in range(2):
        printed = json.loads(run.attempt(0).stdout(rank).read_text())
        assert (printed["variable"], printed["executable"]) == ("/opt/image/lib", "/opt/image/own/python")
        assert "/opt/image/lib" in printed["path"].split(":")
    start = read_start(run.attempt(0))
    assert start is not None
    for node in start["nodes"]:
        assert node["python"] == StartedPython("/opt/image/own/python", VERSION)


def ends_in_ten_minutes(run: RunDir, end: int) -> bool:
    start = read_json(run.attempt(0).start)
    return start is not None and 500 <= end - start["started"] <= 600
