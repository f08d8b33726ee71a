"""Which GPUs are found: by the variable, else by nvidia-smi (a fake one on PATH)."""

import socket

import pytest

from clusterddp.system.devices import loopback_interface, visible_gpus

TWO_GPUS = """GPU 0: NVIDIA H200 (UUID: GPU-8f0c7b0e-1111-2222-3333-444444444444)
GPU 1: NVIDIA H200 (UUID: GPU-8f0c7b0e-1111-2222-3333-555555555555)
"""
MIG = """GPU 0: NVIDIA A100 (UUID: GPU-1)
  MIG 3g.20gb     Device  0: (UUID: MIG-aa)
  MIG 3g.20gb     Device  1: (UUID: MIG-bb)
GPU 1: NVIDIA A100 (UUID: GPU-2)
"""


def fake_nvidia_smi(tmp_path, listing, code=0):
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] || exit 9\n/bin/cat <<'END'\n{listing}END\nexit {code}\n")
    command.chmod(0o755)
    return {"PATH": str(tmp_path)}


@pytest.mark.parametrize(
    ("value", "gpus"),
    [
        ("", ()),
        ("-1", ()),
        ("0", ("0",)),
        ("2, 3", ("2", "3")),
        ("GPU-8f0c,MIG-aa", ("GPU-8f0c", "MIG-aa")),
        ("1,-1,0", ("1",)),
        ("1,,0", ("1",)),
    ],
)
def test_the_variable_is_taken_at_its_word(tmp_path, value, gpus):
    environ = fake_nvidia_smi(tmp_path, TWO_GPUS) | {"CUDA_VISIBLE_DEVICES": value}
    assert visible_gpus(environ) == gpus


def test_without_the_variable_nvidia_smi_is_asked(tmp_path):
    assert visible_gpus(fake_nvidia_smi(tmp_path, TWO_GPUS)) == ("0", "1")


def test_a_gpu_in_slices_is_used_by_its_slices(tmp_path):
    assert visible_gpus(fake_nvidia_smi(tmp_path, MIG)) == ("MIG-aa", "MIG-bb", "1")


def test_no_nvidia_smi_and_a_failing_one_mean_no_gpu(tmp_path):
    assert visible_gpus({"PATH": str(tmp_path)}) == ()
    assert visible_gpus(fake_nvidia_smi(tmp_path, "NVIDIA-SMI has failed\n", code=9)) == ()


def test_the_loopback_interface_exists():
    assert loopback_interface() in [name for _, name in socket.if_nameindex()]
