"""Downloads a data set once per host, with torchvision: the only place that imports it."""

from __future__ import annotations

import fcntl
import importlib
import logging
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.error import URLError

import torch

from clusterddp.errors import ClusterddpError
from clusterddp.ranks.environment import inherited_environment

_SOCKET_TIMEOUT_S = 30.0  # a compute node behind a firewall answers nothing at all

log = logging.getLogger(__name__)
_declared_operators: list[torch.library.Library] = []  # torch forgets a declaration with its Library object


def download_once(
    torchvision_name: str,
    title: str,
    data_dir: Path,
    *,
    find: Callable[[Path], Path | None],
    results: Sequence[str],
    halves: Sequence[Mapping[str, Any]] = ({},),
) -> Path:
    """Return the folder that `find` finds under `data_dir`, after downloading the set if need be.

    `torchvision_name` is the class in torchvision.datasets, called with each of `halves`, and `results` the names of
    the entries that it makes in its root. Processes of all ranks may call this at once: one downloads under a lock, the
    others wait. The files arrive in a staging folder; a rename puts each of `results` under `data_dir`.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with (data_dir / f".{torchvision_name}.lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # between the processes of this host; it ends with the one that holds it
            if (folder := find(data_dir)) is not None:
                return folder
            read = getattr(import_torchvision().datasets, torchvision_name)
            log.info("downloading %s to %s", title, data_dir)
            staging = Path(tempfile.mkdtemp(prefix=f".{torchvision_name}-", dir=data_dir))
            timeout = socket.getdefaulttimeout()
            socket.setdefaulttimeout(_SOCKET_TIMEOUT_S)
            try:
                for half in halves:
                    read(str(staging), download=True, **half)
                for result in results:
                    (staging / result).rename(data_dir / result)
            except OSError:
                if find(data_dir) is None:  # else another host was faster, on a file system shared without locks
                    raise
            finally:
                socket.setdefaulttimeout(timeout)
                shutil.rmtree(staging, ignore_errors=True)
            if (folder := find(data_dir)) is None:
                raise RuntimeError(f"torchvision reported success, but {data_dir} lacks the files")
            return folder
    except (OSError, URLError, RuntimeError, ValueError, ImportError) as error:
        cause = " ".join(str(error).split())  # torchvision's own texts have several lines
        raise ClusterddpError(
            f"{title} could not be downloaded to {data_dir}: {type(error).__name__}: {cause}",
            hint="download it where there is a network and set train.data_dir, or take train.dataset=shapes",
        ) from error


def default_data_dir() -> Path:
    """Return where data sets go when the spec names no place."""
    cache = Path(inherited_environment().get("XDG_CACHE_HOME", "").strip() or Path.home() / ".cache")
    return cache / "clusterddp" / "datasets"


def missing_error(title: str, data_dir: Path, *, wanted: str) -> ClusterddpError:
    """Return the error for a set that is not there and may not be downloaded."""
    return ClusterddpError(
        f"{data_dir}: {title} is not there: expected {wanted}",
        hint="set train.data_dir to the directory that holds it, or train.download=true",
    )


def import_torchvision() -> ModuleType:
    """Import torchvision with its data sets, also beside a torch that it was not built for.

    A torchvision built for CUDA does not load its compiled operators beside a CPU build of torch, and then fails at
    import because two of them, nms and qnms, are unknown ("operator torchvision::nms does not exist"). Declaring their
    schemas is enough for everything that does not call them, and data sets do not.
    """
    try:
        importlib.import_module("torchvision.datasets")
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        operators = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
        operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
        _declared_operators.append(operators)
        log.warning(
            "torchvision was built for another torch than %s (%s); its operators nms and qnms are declared without "
            "code, data sets work",
            torch.__version__,
            error,
        )
    return importlib.import_module("torchvision")
