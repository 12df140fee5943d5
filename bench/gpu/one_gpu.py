"""Every CUDA path on one GPU, checked and measured, in one run of under ten minutes.

    python bench/gpu/one_gpu.py [--device cuda] [--small]

Checks: loss and gradients of each family in float32 against float64 on the CPU, documents packed and not; recompute
and torch.compile against plain; a run of steps with `deterministic` resumed from a checkpoint, bit for bit; greedy
generation with the cache against full recomputation. Measures: tokens per second, model FLOP utilisation and peak
memory of a 1 B Llama shape at sequence 4096 in bf16. `--small` shrinks the measured model, so that the script itself
can be tried on a CPU. Writes `bench/results/gpu_one_gpu.json`; exit code 1 when a check does not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import write_result
from meshwright.model.config import ModelConfig
from meshwright.model.documents import Documents
from meshwright.model.initialise import initialise
from meshwright.model.parameters import parameter_table
from meshwright.model.presets import preset
from meshwright.model.transformer import Transformer
from meshwright.plan.devices import peak_flops
from meshwright.plan.flops import FLOPS_CONVENTION, training_flops_per_token
from meshwright.probe.matmul import matmul_flops_per_second
from meshwright.train.checkpoint import Checkpointer
from synthetic import synthetic_trainer

FAMILIES = ("llama-tiny", "mistral-tiny", "qwen2-tiny", "qwen3-tiny", "gpt2-tiny")
LLAMA_1B = {
    "vocabulary": 32000,
    "hidden": 2048,
    "layers": 18,
    "heads": 16,
    "kv_heads": 16,
    "intermediate": 5632,
    "sequence": 4096,
    "batch": 4,
}
SMALL = {**LLAMA_1B, "vocabulary": 512, "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 4, "intermediate": 128}
SMALL |= {"sequence": 128, "batch": 2}


def batch(config: ModelConfig, rows: int = 2, sequence: int = 96) -> tuple[torch.Tensor, torch.Tensor, Documents]:
    """Random tokens, targets with gaps, and rows of several documents."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, config.vocabulary, (rows, sequence), generator=generator)
    targets = torch.randint(0, config.vocabulary, (rows, sequence), generator=generator)
    targets[torch.rand(rows, sequence, generator=generator) < 0.1] = -100
    return tokens, targets, Documents.from_starts([[0, 17, 60], [0, 5]], sequence)


def gradients(
    config: ModelConfig, device: str, dtype: torch.dtype, packed: bool, compiled: bool = False, recompute: str = "none"
) -> dict[str, torch.Tensor]:
    """Loss and every gradient on a device, brought to float64 on the CPU."""
    model = Transformer(config, device=device, dtype=dtype, recompute=recompute)
    initialise(model, parameter_table(config), 0)
    if compiled:
        model.compile_blocks()
    tokens, targets, documents = batch(config)
    loss = model(tokens.to(device), targets.to(device), documents.to(device) if packed else None)
    loss.backward()
    found = {name: value.grad.double().cpu() for name, value in model.named_parameters() if value.grad is not None}
    return {"loss": loss.detach().double().cpu(), **found}


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest relative error of a tensor, by the measure of `meshwright verify`."""
    squares = torch.stack([value.square().sum() for name, value in b.items() if name != "loss"])
    count = sum(value.numel() for name, value in b.items() if name != "loss")
    floor = 1e-3 * float((squares.sum() / count).sqrt())
    return max(float((a[n] - b[n]).norm() / max(float(b[n].norm()), floor * b[n].numel() ** 0.5)) for n in b)


def check_numbers(device: str) -> dict[str, float]:
    """Relative errors of float32 on the device against float64 on the CPU."""
    errors = {}
    for name in FAMILIES:
        config = dataclasses.replace(preset(name), layers=2)
        for packed in (False, True):
            reference = gradients(config, "cpu", torch.float64, packed)
            errors[f"{name} packed={packed}"] = worst(gradients(config, device, torch.float32, packed), reference)
        if name == "llama-tiny":
            for how in ({"compiled": True}, {"recompute": "selective"}, {"recompute": "full"}):
                found = gradients(config, device, torch.float32, True, **how)
                errors[f"{name} {how}"] = worst(found, reference)
    return errors


def check_resume(device: str) -> bool:
    """Six steps in one go, and three, a checkpoint, a new trainer and three more: the same masters, bit for bit."""
    from meshwright.comm.mesh import Mesh
    from meshwright.layout import Layout

    def trainer() -> Any:
        mesh = Mesh.single(Layout.parse("bf16"), device)
        return synthetic_trainer(SMALL, "bf16", compile_blocks=False, mesh=mesh)

    torch.use_deterministic_algorithms(True)
    try:
        whole = trainer()
        for _ in range(6):
            whole.step()
        with tempfile.TemporaryDirectory() as directory:
            first = trainer()
            for _ in range(3):
                first.step()
            saver = Checkpointer(Path(directory), first.mesh, first.config)
            saver.save(3, first.pieces(owned=True), first.state())
            saver.wait()
            second = trainer()
            found = saver.newest()
            assert found is not None
            second.restore(saver.load(found, second.pieces(owned=False)))
            for _ in range(3):
                next(second.tokens._batches)  # the synthetic stream goes on where it stopped
                second_step = None
            for _ in range(3):
                second_step = second.step()
            assert second_step is not None
        pairs = zip(whole.parallel.shards, second.parallel.shards, strict=True)
        return all(torch.equal(a.master, b.master) for a, b in pairs)
    finally:
        torch.use_deterministic_algorithms(False)


def check_generation(device: str) -> bool:
    """Greedy tokens with the key-value cache equal those of full recomputation."""
    from meshwright.model.cache import KeyValueCache

    config = preset("llama-tiny")
    model = Transformer(config, device=device, dtype=torch.float32)
    initialise(model, parameter_table(config), 0)
    tokens = torch.arange(7, device=device)[None]
    with torch.no_grad():
        cache = KeyValueCache(config, capacity=40)
        logits = model.logits(tokens, cache=cache)
        for _ in range(30):
            following = logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, following), dim=1)
            logits = model.logits(following, cache=cache)
            if not torch.allclose(model.logits(tokens)[:, -1], logits[:, -1], atol=1e-4):
                return False
    return True


def measure(device: str, shape: dict[str, int]) -> dict[str, Any]:
    """Tokens per second and utilisation of the real trainer's step."""
    from meshwright.comm.mesh import Mesh
    from meshwright.layout import Layout

    cuda = device.startswith("cuda")
    name = torch.cuda.get_device_name() if cuda else "cpu"
    peak = (peak_flops(name, "bf16") if cuda else None) or matmul_flops_per_second(torch.bfloat16, device, 1.0)
    results: dict[str, Any] = {"device": name, "peak_bf16_tflops": peak / 1e12, "flops_convention": FLOPS_CONVENTION}
    for layout in ("bf16", "ac:selective bf16"):
        mesh = Mesh.single(Layout.parse(layout), device)
        trainer = synthetic_trainer(shape, layout, compile_blocks=True, mesh=mesh)
        for _ in range(4):
            trainer.step()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(12):
            begun = time.perf_counter()
            verdict = trainer.step()
            seconds.append(time.perf_counter() - begun)
        rate = shape["batch"] * shape["sequence"] / statistics.median(seconds)
        results[layout] = {
            "parameters": trainer.table.numel,
            "tokens_per_second": round(rate, 1),
            "mfu": round(rate * training_flops_per_token(trainer.config, shape["sequence"]) / peak, 4),
            "median_step_seconds": round(statistics.median(seconds), 4),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
            "loss": verdict.loss,
            "seconds_by_part": trainer.clock.seconds(),
        }
        del trainer
        if cuda:
            torch.cuda.empty_cache()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    errors = check_numbers(options.device)
    checks: dict[str, Callable[[], bool]] = {
        "errors below 1e-4": lambda: max(errors.values()) < 1e-4,
        "resume bit for bit": lambda: check_resume(options.device),
        "cache equals recomputation": lambda: check_generation(options.device),
    }
    held = {name: check() for name, check in checks.items()}
    result = {
        "errors": errors,
        "checks": held,
        "training": measure(options.device, SMALL if options.small else LLAMA_1B),
    }
    if options.device.startswith("cuda") and not options.small:
        write_result("gpu_one_gpu", result)
    else:
        print(result)
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
