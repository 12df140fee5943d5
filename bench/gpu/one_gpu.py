"""One GPU, measured and checked in one run of under ten minutes: no case begins after nine.

    python bench/gpu/one_gpu.py [--device cuda] [--small] [--only "training: 1B"]

Measured first, in bf16: tokens per second, model FLOP utilisation and peak memory of a 1 B Llama shape at sequence 4096
and of eight layers as wide as Llama-3 8B's at sequence 8192, also with eight packed documents in a sequence, by
variable-length attention and, for the first, by a mask of all pairs of tokens; how long a background save holds up
training; steps that replay a CUDA graph; where the host waits for the GPU in a step; the attention kernels alone;
weight gradients added in float32, batches loaded in advance, the gradient norm, expandable segments and pinned
snapshots (`step_paths.py`). Then checked: loss and gradients of each family in float32 against float64 on the CPU,
documents packed and not; those of variable-length attention in bf16 against the mask's; ring attention of documents and
windows, its ranks one after the other, by flash kernels against float64 and against tiles; recompute and torch.compile
against plain; a run of steps with `deterministic` resumed from a checkpoint, bit for bit, documents packed and not;
greedy generation with the cache against full recomputation. Each case fails alone.
`--small` shrinks the measured model, so that the script itself can be tried on a CPU. Writes
`bench/results/gpu_one_gpu.json`, with the seconds of each case; exit code 1 when a check does not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from cases import Cases, step_seconds
from ring import ring_errors, ring_seconds
from step_paths import graph_cases, step_cases

from bench.shared.key_value_cache import KeyValueCache
from bench.shared.packed_documents import documents_from_starts
from meshwright.checkpoint import Checkpointer, SaveOptions
from meshwright.comm.mesh import Mesh
from meshwright.launcher.gpu_process import prepare_gpu_process
from meshwright.layout import Layout
from meshwright.model import attention_inputs
from meshwright.model.axis_operations import AxisOperations
from meshwright.model.documents import Documents
from meshwright.model.initialise import initialise
from meshwright.model.transformer import Transformer
from meshwright.model.varlen_attention import VarlenMask, varlen_attention
from meshwright.parallel.recompute import ActivationCheckpointing
from meshwright.planner.hardware.devices import peak_flops
from meshwright.probe.matmul import measure_matmul_rate
from meshwright.spec.config import ModelConfig
from meshwright.spec.flops import FLOPS_CONVENTION, training_flops_per_token
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from meshwright.training.deterministic import deterministic
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
LLAMA_8B_WIDE = {
    "vocabulary": 32000,
    "hidden": 4096,
    "layers": 8,
    "heads": 32,
    "kv_heads": 8,
    "intermediate": 14336,
    "sequence": 8192,
    "batch": 2,
}
SMALL = {**LLAMA_1B, "vocabulary": 512, "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 4, "intermediate": 128}
SMALL |= {"sequence": 128, "batch": 2}


def batch(config: ModelConfig, rows: int = 2, sequence: int = 96) -> tuple[torch.Tensor, torch.Tensor, Documents]:
    """Random tokens, targets with gaps, and rows of several documents."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, config.vocabulary, (rows, sequence), generator=generator)
    targets = torch.randint(0, config.vocabulary, (rows, sequence), generator=generator)
    targets[torch.rand(rows, sequence, generator=generator) < 0.1] = -100
    return tokens, targets, documents_from_starts([[0, 17, 60], [0, 5]], sequence)


def gradients(
    config: ModelConfig, device: str, dtype: torch.dtype, packed: bool, compiled: bool = False, recompute: str = "none"
) -> dict[str, torch.Tensor]:
    """Loss and every gradient on a device, brought to float64 on the CPU."""
    axes = AxisOperations(recompute=ActivationCheckpointing(recompute))
    model = Transformer(config, axes=axes, device=device, dtype=dtype)
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


def family_error(name: str, device: str, packed: bool, compiled: bool = False, recompute: str = "none") -> float:
    """Relative error of float32 on the device against float64 on the CPU."""
    config = dataclasses.replace(preset(name), layers=2)
    reference = gradients(config, "cpu", torch.float64, packed)
    return worst(gradients(config, device, torch.float32, packed, compiled, recompute), reference)


def check_resume(device: str, compiled: bool, documents: int = 1) -> bool:
    """Six steps in one go, and three, a checkpoint, a new trainer and three more: the same masters, bit for bit."""

    def trainer() -> Any:
        mesh = Mesh.single(Layout.parse("bf16"), device)
        return synthetic_trainer({**SMALL, "documents": documents}, "bf16", compile_blocks=compiled, mesh=mesh)

    with deterministic(True, compiled):
        whole = trainer()
        for _ in range(6):
            whole.step()
        with tempfile.TemporaryDirectory() as directory:
            first = trainer()
            for _ in range(3):
                first.step()
            saver = Checkpointer(Path(directory), first.mesh, first.task.config)
            saver.save(3, first.slices(owned=True), first.state())
            saver.wait()
            second = trainer()
            found = saver.load_newest(second.slices(owned=False))
            assert found is not None
            second.restore(found[1])
            for _ in range(3):
                second.task.tokens.read_batch(np.arange(SMALL["batch"]))  # the stream continues where it stopped
                second_step = None
            for _ in range(3):
                second_step = second.step()
            assert second_step is not None
        pairs = zip(whole.parallel.shards, second.parallel.shards, strict=True)
        return all(torch.equal(a.master, b.master) for a, b in pairs)


def check_generation(device: str) -> bool:
    """Greedy tokens with the key-value cache equal those of full recomputation."""
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


def measure(device: str, shape: dict[str, int], layout: str) -> dict[str, Any]:
    """Tokens per second and utilisation of the real trainer's step, its blocks compiled."""
    cuda = device.startswith("cuda")
    name = torch.cuda.get_device_name() if cuda else "cpu"
    peak = (peak_flops(name, "bf16") if cuda else None) or measure_matmul_rate(torch.bfloat16, device, 1.0)
    trainer: Any = synthetic_trainer(shape, layout, compile_blocks=True, mesh=Mesh.single(Layout.parse(layout), device))
    seconds = step_seconds(trainer.step, 4, 8, cuda)
    rate = shape["batch"] * shape["sequence"] / seconds
    peak_gib = round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None
    return {
        "parameters": trainer.task.table.numel,
        "tokens_per_second": round(rate, 1),
        # Attention is counted for sequences of one document.
        "mfu": round(rate * training_flops_per_token(trainer.task.config, shape["sequence"]) / peak, 4),
        "peak_bf16_tflops": peak / 1e12,
        "median_step_seconds": round(seconds, 4),
        "peak_gib": peak_gib,
        "seconds_by_part": trainer.clock.seconds(),
    }


@contextmanager
def dense_masks() -> Iterator[None]:
    """Attention by masks of all pairs of tokens, as without variable-length kernels."""
    with mock.patch.object(attention_inputs, "choose_mask_form", lambda *_: "boolean"):
        yield


def measure_dense(device: str, shape: dict[str, int], layout: str) -> dict[str, Any]:
    """As `measure`, by masks of all pairs of tokens."""
    with dense_masks():
        return measure(device, shape, layout)


def host_waits(device: str, shape: dict[str, int]) -> dict[str, int]:
    """Places in the code where the host waits for the GPU in a training step, and how often."""
    trainer: Any = synthetic_trainer(
        shape, "bf16", compile_blocks=False, mesh=Mesh.single(Layout.parse("bf16"), device)
    )
    for _ in range(2):
        trainer.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        trainer.step()
        torch.cuda.set_sync_debug_mode("default")
    places = [f"{Path(each.filename).name}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)]
    return dict(Counter(places))


def attention_kernels(device: str, shape: dict[str, int]) -> dict[str, float | str]:
    """TFLOP/s of causal attention, forward and backward together (seven products of each pair of tokens), by kernel;
    with variable lengths of one document a row, so that the work is the same."""
    rows, tokens, heads, kv_heads = (shape[key] for key in ("batch", "sequence", "heads", "kv_heads"))
    size = shape["hidden"] // heads
    x = torch.randn(rows, tokens, heads + 2 * kv_heads, size, device=device, dtype=torch.bfloat16, requires_grad=True)
    q, k, v = (each.transpose(1, 2) for each in torch.split(x, [heads, kv_heads, kv_heads], dim=2))
    d_out = torch.randn(rows, tokens, heads, size, device=device, dtype=torch.bfloat16).transpose(1, 2)
    bounds = torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32, device=device)
    many_bounds = torch.cat((bounds, bounds[-1:].expand(64 - rows)))
    found: dict[str, float | str] = {}

    def run(attend: Callable[[], torch.Tensor]) -> None:
        """Forward and backward of one attention call."""
        torch.autograd.grad(attend(), x, d_out)

    dense = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "varlen": lambda: varlen_attention(q, k, v, VarlenMask(bounds, torch.tensor(tokens))),
        "varlen, 63 empty documents": lambda: varlen_attention(q, k, v, VarlenMask(many_bounds, torch.tensor(tokens))),
        "varlen, window of 1,024": lambda: varlen_attention(q, k, v, VarlenMask(None, None, 1024)),
        "chosen by PyTorch": dense,
    }
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def chosen(backend: SDPBackend = backend) -> torch.Tensor:
            """Attention by one backend."""
            with sdpa_kernel(backend):
                return dense()

        calls[backend.name.lower()] = chosen
    flops = 7 * rows * heads * tokens * tokens * size  # 2 per multiply-add, half of all pairs
    for name, call in calls.items():
        try:
            found[name] = round(flops / step_seconds(partial(run, call), 3, 10, True) / 1e12, 1)
        except RuntimeError as error:
            found[name] = str(error)[:200]
    return found


def varlen_error(name: str, device: str) -> dict[str, float]:
    """Relative error in bf16 of loss and gradients with packed documents, against float64 on the CPU: by
    variable-length attention, and by masks of all pairs of tokens."""
    config = dataclasses.replace(preset(name), layers=2)
    reference = gradients(config, "cpu", torch.float64, True)
    varlen = worst(gradients(config, device, torch.bfloat16, True), reference)
    with dense_masks():
        return {"varlen": varlen, "mask": worst(gradients(config, device, torch.bfloat16, True), reference)}


def save_stall(device: str, shape: dict[str, int]) -> dict[str, float]:
    """How long background saves hold training up, how much of that the GPU waits in the next update for the copies, and
    how long they write; bytes of the state."""
    trainer: Any = synthetic_trainer(
        shape, "bf16", compile_blocks=False, mesh=Mesh.single(Layout.parse("bf16"), device)
    )
    trainer.step()
    pieces, saving, stalls, writing = trainer.slices(owned=True), [], [], []
    with tempfile.TemporaryDirectory() as directory:
        saver = Checkpointer(Path(directory), trainer.mesh, trainer.task.config, SaveOptions(keep=1))
        saver.on_stall = lambda step, seconds: stalls.append(seconds)
        trainer.before_update = saver.wait_on_stream
        for step in range(1, 3):
            begun = time.perf_counter()
            saver.save(step, pieces, trainer.state())
            saving.append(saver.stall_seconds)
            trainer.step()
            saver.wait()
            writing.append(time.perf_counter() - begun)
    size = sum(piece.tensor.nbytes for piece in pieces)
    waits = [stall - seconds for stall, seconds in zip(stalls, saving, strict=True)]
    found = {
        "first_stall_seconds": stalls[0],
        "stall_seconds": stalls[1],
        "update_waits_seconds": waits[1],
    }
    return {**found, "seconds": min(writing), "bytes": size}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", help="regular expression of the cases to run; the results of others stay")
    options = parser.parse_args()
    device, cuda = options.device, options.device.startswith("cuda")
    if cuda:
        prepare_gpu_process(1)  # as a rank of training does, before CUDA starts
    torch.set_float32_matmul_precision("highest")
    header = {"device": torch.cuda.get_device_name() if cuda else "cpu", "flops_convention": FLOPS_CONVENTION}
    cases = Cases("gpu_one_gpu" if cuda and not options.small else None, header, only=options.only)
    shapes = {"small": SMALL} if options.small else {"1B": LLAMA_1B, "8B, 8 layers": LLAMA_8B_WIDE}
    of_documents = {name: {**shape, "documents": 8} for name, shape in shapes.items()}
    for name, shape in shapes.items():
        cases.run("training", f"{name} bf16", partial(measure, device, shape, "bf16"))
    for name, shape in of_documents.items():
        cases.run("training", f"{name} bf16, packed", partial(measure, device, shape, "bf16"))
    cases.run("saving", "0.2B", partial(save_stall, device, SMALL if options.small else {**LLAMA_1B, "layers": 3}))
    graph_cases(cases, device, shapes)
    for name, shape in of_documents.items() if cuda else ():
        cases.run("host waits", name, partial(host_waits, device, {**shape, "layers": 2}))
        cases.run("attention", name, partial(attention_kernels, device, shape))
    step_cases(cases, device, shapes)
    first = next(iter(shapes))
    cases.run("training", f"{first} ac:selective bf16", partial(measure, device, shapes[first], "ac:selective bf16"))
    if cuda:
        cases.run(
            "training", f"{first} bf16, packed, masks", partial(measure_dense, device, of_documents[first], "bf16")
        )
    for compiled in (False, True):
        title = f"resume bit for bit{', compiled' * compiled}"
        cases.run("checks", title, partial(check_resume, device, compiled), bool)
    cases.run("checks", "resume bit for bit, packed", partial(check_resume, device, True, 8), bool)
    cases.run("checks", "cache equals recomputation", partial(check_generation, device), bool)
    below = 1e-4
    for family in FAMILIES:
        for packed in (False, True):
            error = partial(family_error, family, device, packed)
            cases.run("errors", f"{family} packed={packed}", error, lambda found: found < below)
        if cuda:
            both = partial(varlen_error, family, device)
            cases.run("errors", f"{family} bf16", both, lambda found: found["varlen"] < 1.5 * found["mask"])
    for name, shape in shapes.items():
        for window in (None, 3 * shape["sequence"] // 8):
            title = f"{name}, documents{'' if window is None else f', window of {window}'}"
            ring = partial(ring_errors, device, shape, window)
            cases.run("ring attention errors", title, ring, lambda found: found["flash"] < 1.5 * found["tiles"])
            if cuda:
                cases.run("ring attention seconds", title, partial(ring_seconds, device, shape, window))
    for how in ({"compiled": True}, {"recompute": "selective"}, {"recompute": "full"}):
        error = partial(family_error, "llama-tiny", device, True, **how)
        cases.run("errors", f"llama-tiny {how}", error, lambda found: found < below)
    return cases.end()


if __name__ == "__main__":
    raise SystemExit(main())
