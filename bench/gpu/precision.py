"""The precisions on one GPU, checked and measured, in one run of under five minutes.

    python bench/gpu/precision.py [--device cuda] [--small]

Measures first: seconds of a training step of a Llama shape at sequence 2048 in fp32, tf32, bf16 and fp16, in turns.
Then checks: tf32 multiplies float32 less exactly than fp32 does, and not otherwise than CUDA's TF32 (10 bits); fp16
with a scaled loss learns what float32 learns, within 2%, and finds its scale from 2^30 downwards by steps that are
skipped. Each case fails alone. `--small` shrinks the shape, so that the script itself can be tried on a CPU (where
there is no tf32). Writes `bench/results/gpu_precision.json`; exit code 1 when a check does not hold.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
from cases import Cases

from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.training.loss_scale import LossScale
from meshwright.training.precision import set_matmul_precision
from meshwright.training.trainer import Trainer
from synthetic import synthetic_trainer

SHAPE = {
    "vocabulary": 32000, "hidden": 1024, "layers": 8, "heads": 16, "kv_heads": 16, "intermediate": 2816,
    "sequence": 2048, "batch": 4,
}  # fmt: skip
SMALL = {
    "vocabulary": 512, "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 4, "intermediate": 128,
    "sequence": 64, "batch": 4,
}  # fmt: skip
LEARNING_STEPS, SEARCHING_STEPS, SETTLED_STEPS, TURNS = 60, 40, 10, 12
TF32_ERROR = 2.0**-10  # rounding error of a factor with 10 bits is at most half of this; two factors


def trainer_of(precision: str, device: str, shape: dict[str, int]) -> Trainer:
    """A trainer ready to step, on one device."""
    mesh = Mesh.single(Layout.parse(precision), device)
    return synthetic_trainer(shape, precision, compile_blocks=False, mesh=mesh)


def product_error(precision: str, device: str) -> float:
    """Relative error of a product of float32 matrices under a precision, against float64."""
    set_matmul_precision(precision, torch.device(device))
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, generator=generator, dtype=torch.float64) for _ in range(2))
    found = (a.float().to(device) @ b.float().to(device)).double().cpu()
    return float((found - a @ b).norm() / (a @ b).norm())


def losses(precision: str, device: str, steps: int) -> list[float]:
    """The losses of the first steps of a small model."""
    trainer = trainer_of(precision, device, SMALL)
    return [trainer.step().loss for _ in range(steps)]


def search(device: str) -> dict[str, Any]:
    """fp16 from a scale that overflows: whether it found one that does not, steps skipped, where the scale ended."""
    trainer = trainer_of("fp16", device, SMALL)
    trainer.loss_scale = LossScale(2.0**30, 2000)
    finite = [trainer.step().finite for _ in range(SEARCHING_STEPS)]
    settled = not finite[0] and all(finite[-SETTLED_STEPS:])
    return {"settled": settled, "skipped": finite.count(False), "scale": trainer.loss_scale.value}


def measure(device: str, shape: dict[str, int], precisions: list[str]) -> dict[str, Any]:
    """Median seconds of a step, in turns."""
    cuda = device.startswith("cuda")
    seconds: dict[str, list[float]] = {precision: [] for precision in precisions}
    trainers = {precision: trainer_of(precision, device, shape) for precision in precisions}
    for turn in range(TURNS + 2):
        for precision, trainer in trainers.items():
            set_matmul_precision(precision, torch.device(device))  # set for the process, not for a trainer
            begun = time.perf_counter()
            trainer.step()
            if cuda:
                torch.cuda.synchronize()
            if turn >= 2:
                seconds[precision].append(time.perf_counter() - begun)
    tokens = shape["batch"] * shape["sequence"]
    return {
        precision: {
            "median_step_seconds": statistics.median(found),
            "tokens_per_second": tokens / statistics.median(found),
            "parameters": trainers[precision].task.table.numel,
        }
        for precision, found in seconds.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    device, cuda = options.device, options.device.startswith("cuda")
    header = {"device": torch.cuda.get_device_name() if cuda else "cpu"}
    cases = Cases("gpu_precision" if cuda and not options.small else None, header, 280.0)
    precisions = ["fp32", *(["tf32"] if cuda else []), "bf16", "fp16"]
    shape = SMALL if options.small else SHAPE
    cases.run("measured", "steps", partial(measure, device, shape, precisions))
    error = partial(product_error, "fp32", device)
    exact = cases.run("product_errors", "fp32", error, lambda found: found < 1e-6)
    if cuda and exact is not None:
        error = partial(product_error, "tf32", device)
        cases.run("product_errors", "tf32", error, lambda found: 10 * exact < found < TF32_ERROR)
    whole = cases.run("losses", "fp32", lambda: losses("fp32", device, LEARNING_STEPS)[-1])
    if whole is not None:
        cases.run(
            "losses",
            "fp16",
            lambda: losses("fp16", device, LEARNING_STEPS)[-1],
            lambda found: abs(found - whole) < 0.02 * whole,
        )
    cases.run("search", "fp16", partial(search, device), lambda found: found["settled"])
    return cases.end()


if __name__ == "__main__":
    raise SystemExit(main())
