"""Peak matmul FLOP/s of a device, the denominator of MFU."""

from __future__ import annotations

import torch

from meshwright.comm import collectives
from meshwright.comm.mesh import Mesh
from meshwright.planner.hardware.devices import peak_flops
from meshwright.probe.matmul import measure_matmul_rate
from meshwright.training.precision import PARAMETER_DTYPES


def device_peak_flops(mesh: Mesh, precision: str) -> float:
    """Return the dense peak FLOP/s of one device of the mesh in a precision ("bf16", "fp32" ...): the published figure
    of a known GPU, else the measured FLOP/s of a matmul that all ranks run at the same time, averaged over ranks.
    Collective."""
    device = torch.device(mesh.device)
    if device.type == "cuda":
        published = peak_flops(torch.cuda.get_device_name(device), precision)
        if published is not None:
            return published
    collectives.barrier(mesh.world, "start.peak")
    rate = torch.tensor(measure_matmul_rate(PARAMETER_DTYPES[precision], device), dtype=torch.float64, device=device)
    collectives.all_reduce(rate, mesh.world, "start.peak")
    return float(rate) / mesh.world_size
