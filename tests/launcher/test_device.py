"""GPUs of a server's ranks, queried without torch in this process."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from meshwright.errors import UserError
from meshwright.launcher import device
from meshwright.launcher.host_memory import GPU, HostMemory


def test_ranks_get_the_memory_of_their_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device, "_has_driver", lambda: True)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0, stdout="[[7, 8], [5, 6]]\n"))
    assert device.choose_rank_devices("auto", 1) == [HostMemory(8, 7, GPU)]
    assert device.choose_rank_devices("cuda", 2) == [HostMemory(8, 7, GPU), HostMemory(6, 5, GPU)]
    assert device.choose_rank_devices("cpu", 3) == []
    for wanted in ("auto", "cuda"):
        with pytest.raises(UserError, match="has 2 CUDA devices, and each of the layout's 3 ranks here needs one"):
            device.choose_rank_devices(wanted, 3)


def test_failing_gpu_query_is_one_error_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device, "_has_driver", lambda: True)
    failed = SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nRuntimeError: busy\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(UserError, match=r"cannot be queried \(RuntimeError: busy\)"):
        device.choose_rank_devices("auto", 1)


def test_auto_device_is_cpu_without_driver(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device, "_has_driver", lambda: False)
    assert device.choose_rank_devices("auto", 4) == []
    with pytest.raises(UserError, match='device "cuda": this machine has no CUDA device'):
        device.choose_rank_devices("cuda", 1)
    with pytest.raises(UserError, match='unknown device "gpu"'):
        device.choose_rank_devices("gpu", 1)


def test_gpu_query_program_runs(monkeypatch: pytest.MonkeyPatch):
    """With a driver but no GPU that torch can use, the other process finds none."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(device, "_has_driver", lambda: True)
    assert len(device.choose_rank_devices("auto", torch.cuda.device_count())) == torch.cuda.device_count()


def test_pci_address_of_a_gpu_has_the_form_of_linux(monkeypatch: pytest.MonkeyPatch):
    torch = pytest.importorskip("torch")
    found = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert device.get_pci_address("cuda:1") == "0000:1b:03.0"
