"""The peers: where they come from, a Python that has them, and how one of their loops is started for a turn."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from trainer_rounds import ROOT, Turn, UnavailableError, say

TURN_LIMIT_S = 900


@dataclass(frozen=True, kw_only=True)
class Peers:
    """A directory with a virtual environment and clones; its torch is that of the Python that runs the benchmark."""

    path: Path

    KUANGLIU: ClassVar[str] = "https://github.com/kuangliu/pytorch-cifar"
    AIRBENCH: ClassVar[str] = "https://github.com/KellerJordan/cifar10-airbench"
    PACKAGES: ClassVar[dict[str, str]] = {"lightning": "2.6.6", "accelerate": "1.15.0"}
    DEFAULTS: ClassVar[dict[str, str]] = {
        "kuangliu": "kuangliu/pytorch-cifar's loop (it has no flags for speed)",
        "modelarts": "ModelArts' loop, as published",
        "lightning": "Lightning, defaults",
        "accelerate": "Accelerate, defaults",
    }
    BEST: ClassVar[dict[str, str]] = {
        "lightning": "Lightning, bf16-mixed (if the CPU has it), channels_last, no logger, bar or checkpoints",
        "accelerate": "Accelerate, mixed_precision bf16 (if the CPU has it), channels_last",
    }

    @classmethod
    def set_up(cls, path: Path, *, kuangliu: str) -> Peers:
        """Install and clone what is not there yet; what cannot be had is left out when its turn comes."""
        peers = cls(path=path.resolve())
        peers.path.mkdir(parents=True, exist_ok=True)
        if not (peers.path / "venv" / "complete").exists():
            peers._install()
        peers.clone(kuangliu, "pytorch-cifar")
        return peers

    def clone(self, source: str, name: str) -> Path:
        """Clone a repository unless it is there."""
        target = self.path / name
        if not target.exists():
            say(f"peers: cloning {name}")
            command = ["git", "clone", "-q", source, str(target)]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                say(f"peers: no {name}: {done.stderr.strip()}")
        return target

    def turn(
        self,
        name: str,
        *,
        ranks: int,
        threads: int,
        steps: tuple[int, int],
        best: bool = False,
        batch: int = 128,
        device: str = "cpu",
    ) -> Turn:
        """Run a loop with `batch` images per process; `steps` is how many warm it up and how many are timed.

        Raises: UnavailableError: the peer is not there, or failed.
        """
        warm, timed = steps
        words = [name, "--warm-steps", warm, "--steps", timed, "--batch", batch, "--ranks", ranks, "--threads", threads]
        words += ["--best"] if best else []
        words += ["--device", device] if name == "lightning" else []
        if name == "kuangliu":
            clone = self.path / "pytorch-cifar"
            if not clone.exists():
                raise UnavailableError("pytorch-cifar could not be cloned; --kuangliu PATH takes another place")
            words += ["--kuangliu", clone]
        # Lightning starts its other processes itself; Accelerate's are started as its pages say, by torchrun.
        gang = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        agent = gang if ranks > 1 and name != "lightning" else []
        script = [str(ROOT / "benchmarks" / "trainer_peers.py"), *map(str, words)]
        environ = {"PATH": "/usr/bin:/bin", "HOME": str(self.path), "OMP_NUM_THREADS": str(threads)}
        try:
            done = subprocess.run(
                [str(self._python), *agent, *script],
                env=environ | {"GLOO_SOCKET_IFNAME": "lo"},
                capture_output=True,
                text=True,
                check=False,
                timeout=TURN_LIMIT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(f"{name} was not done after {TURN_LIMIT_S} s") from error
        answers = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
        if done.returncode or len(answers) != 1:
            raise UnavailableError(f"{name} failed: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
        answer = json.loads(answers[0])
        seconds = answer["seconds"]
        return Turn(
            images_per_s=timed * batch * ranks / seconds,
            step_ms=1e3 * seconds / timed,
            steps=timed,
            facts=answer["facts"],
        )

    def versions(self) -> dict[str, str]:
        commit = subprocess.run(
            ["git", "-C", str(self.path / "pytorch-cifar"), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
        return {**self.PACKAGES, "kuangliu/pytorch-cifar": commit or "none"}

    @property
    def _python(self) -> Path:
        return self.path / "venv" / "bin" / "python"

    def _install(self) -> None:
        wanted = [f"{name}=={number}" for name, number in self.PACKAGES.items()]
        say(f"peers: installing {', '.join(wanted)} into {self.path / 'venv'}")
        shutil.rmtree(self.path / "venv", ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(self.path / "venv")], check=True)
        purelib = [str(self._python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        site = subprocess.run(purelib, check=True, capture_output=True, text=True).stdout.strip()
        Path(site, "same_torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([str(self._python), "-m", "pip", "install", "--quiet", *wanted], check=True)
        (self.path / "venv" / "complete").touch()
