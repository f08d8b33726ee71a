"""The command lines and the environment of a run's processes; the submitting side imports none of these programs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from clusterddp.ranks.environment import PLACE_VARIABLES
from clusterddp.spec.secret_values import is_secret
from clusterddp.system.own_directory import SAFE_DIRECTORIES
from clusterddp.system.python import module_command

EXEC_MODULE = "clusterddp.node.exec_command"
"""Becomes the command of `exec` on the machine of its rank."""


def launcher_command(run_dir: Path, attempt: int) -> tuple[str, ...]:
    """Return the command that hands a local run to submitit's local executor."""
    return module_command("clusterddp.places.local.submit", str(run_dir), str(attempt))


def queue_command(sweep_dir: Path) -> tuple[str, ...]:
    """Return the command of a sweep's queue, which starts its runs where Slurm does not."""
    return module_command("clusterddp.submission.sweep_queue", str(sweep_dir))


def rank_command(run_dir: Path) -> tuple[str, ...]:
    """Return the command of a rank; the environment names which rank it is."""
    return module_command("clusterddp.node.rank", str(run_dir))


_FOREIGN_PREFIXES = ("CLUSTERDDP_", "SUBMITIT_", "SLURM_", "TORCHELASTIC_", "PMI_", "PMIX_", "OMPI_COMM_WORLD_")
_TRAVELLING = frozenset(
    {
        "PATH", "HOME", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "MODULEPATH", "LOADEDMODULES",
        "_LMFILES_", "MODULESHOME", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "LD_RUN_PATH",
        "CUDAHOSTCXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "GLIBC_TUNABLES",
        "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
        "SSL_CERT_FILE", "SSL_CERT_DIR", "OPAL_PREFIX", "CC", "CXX", SAFE_DIRECTORIES,
    }
)  # fmt: skip
_TRAVELLING_PREFIXES = (
    "LC_", "PYTHON", "CONDA_", "MAMBA_", "CUDA_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "KMP_", "HF_",
    "TRANSFORMERS_", "WANDB_", "MLFLOW_", "XDG_", "LMOD_", "__LMOD_", "UCX_", "FI_", "OFI_", "TRITON_", "MPI_", "GOMP_",
    "OPENBLAS_", "NVIDIA_", "ROCR_", "HIP_", "ROCM_", "MIOPEN_", "APPTAINER_", "SINGULARITY_", "ENROOT_", "TF_",
    "JAX_", "XLA_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "NVCC_", "NUMBA_", "KINETO_", "MALLOC_", "UCC_", "RDMAV_", "IBV_",
    "MLX4_", "MLX5_", "PSM2_", "PSM3_", "HFI_", "SHARP_", "NVSHMEM_", "CUBLAS_", "CUDNN_", "NVTE_", "TOKENIZERS_",
    "TENSORBOARD_", "EBROOT", "EBVERSION", "EBDEVEL",
)  # fmt: skip
"""Variables that a job gets from the submitting shell: programs find their parts and settings by them."""
_PROXIES = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "FTP_PROXY"})
_OF_THIS_HOST = frozenset({"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "XDG_RUNTIME_DIR",
                           "XDG_SESSION_ID", "XDG_VTNR", "XDG_SEAT", "NVIDIA_VISIBLE_DEVICES"})  # fmt: skip


def process_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for one of a run's own processes, without a cookie.

    Variables of another launcher are removed: a submit from within a Slurm job or from a rank would give the ranks
    wrong values. A relative PYTHONPATH becomes absolute, because the processes start in another directory.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if (not name.startswith(_FOREIGN_PREFIXES) and name not in PLACE_VARIABLES) or name == SAFE_DIRECTORIES
    }
    return kept | python_path(environ)


def python_path(environ: Mapping[str, str]) -> dict[str, str]:
    """Return PYTHONPATH, unless it is empty, with absolute paths and with this package if that is not installed."""
    import importlib.metadata

    paths = [str(Path(path).absolute()) for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    try:
        importlib.metadata.distribution("clusterddp")
    except importlib.metadata.PackageNotFoundError:  # a bare checkout, which Python does not find from any directory
        paths.append(str(Path(__file__).absolute().parents[2]))
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))} if paths else {}


def travelling_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the ranks of a job on other machines: known kinds of variables without secrets.

    The ranks get a secret only if the spec names it. Variables about this host (its GPUs, its run-time directory) are
    left out.
    """
    return {
        name: value
        for name, value in process_environment(environ).items()
        if (name in _TRAVELLING or name.upper() in _PROXIES or name.startswith(_TRAVELLING_PREFIXES))
        and name not in _OF_THIS_HOST
        and not is_secret(name, value)
    }
