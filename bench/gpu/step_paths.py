"""Parts of a training step that only GPUs have: weight gradients added in float32, batches loaded a step in advance,
CUDA graphs of forward and backward, also of packed documents, the gradient norm in few kernels, expandable memory
segments, pinned snapshots, products in chunks. Cases of `one_gpu.py`."""

from __future__ import annotations

import time
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cases import free_memory, step_seconds

from meshwright.checkpoint.snapshot import SnapshotBuffers
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.parallel.zero_engine import _sum_squares
from meshwright.training.cuda_graphs import FixedDocuments, GraphedForwardBackward
from meshwright.training.deterministic import deterministic
from meshwright.training.language_model import LanguageModelTask
from synthetic import synthetic_trainer


def wide_gradients(device: str, shape: dict[str, int]) -> dict[str, float]:
    """The gradient of an MLP's weight over two micro-batches of bf16, added in float32: its relative error against
    float64, and seconds, by products that add to the sum themselves and by products that are rounded and then added."""
    rows, width, hidden = shape["batch"] * shape["sequence"], shape["intermediate"], shape["hidden"]
    cuda = device.startswith("cuda")
    make = torch.Generator(device).manual_seed(0)
    pairs = [
        tuple(torch.randn(rows, size, device=device, generator=make).bfloat16() for size in (width, hidden))
        for _ in range(2)
    ]
    sums = {name: torch.full((width, hidden), torch.nan, device=device) for name in ("inside", "after")}

    def inside() -> None:
        """Two micro-batches by products that accumulate."""
        for beta, (dy, x) in enumerate(pairs):
            if cuda:
                torch.addmm(sums["inside"], dy.T, x, beta=beta, out=sums["inside"], out_dtype=torch.float32)
            else:  # a CPU has no such product: the script itself is tried
                torch.addmm(sums["inside"], dy.T.float(), x.float(), beta=beta, out=sums["inside"])

    def after() -> None:
        """The same, each product in bf16 first."""
        for number, (dy, x) in enumerate(pairs):
            product = dy.T @ x
            sums["after"].add_(product) if number else sums["after"].copy_(product)

    found = {f"{name}_seconds": step_seconds(run, 3, 10, cuda) for name, run in (("inside", inside), ("after", after))}
    exact = torch.stack([dy.double().T[:256] @ x.double() for dy, x in pairs]).sum(dim=0)
    for name, total in sums.items():
        found[f"{name}_error"] = float((total[:256].double() - exact).norm() / exact.norm())
    return found


def prefetch_seconds(device: str, shape: dict[str, int]) -> dict[str, float]:
    """Median seconds of a step, with the next batch loaded during the step and without."""
    found: dict[str, float] = {}
    cuda = device.startswith("cuda")
    for name in ("prefetched", "loaded"):
        trainer: Any = synthetic_trainer(
            shape, "bf16", compile_blocks=False, mesh=Mesh.single(Layout.parse("bf16"), device)
        )
        skip = mock.patch.object(LanguageModelTask, "prefetch_step", lambda task, step: None)
        if name == "loaded":
            with skip:
                found[name] = step_seconds(trainer.step, 3, 8, cuda)
        else:
            found[name] = step_seconds(trainer.step, 3, 8, cuda)
        found[f"{name}_data_seconds"] = trainer.clock.seconds()["data"]
        del trainer
    return found


def graph_trainer(device: str, shape: dict[str, int], compiled: bool, graphs: bool, mesh: Mesh | None = None) -> Any:
    """Return a trainer whose forward and backward are a CUDA graph from the third step on, if `graphs`; a CPU, on which
    the script is tried, has none. mesh: of this rank; None: of one device without process groups."""
    mesh = mesh or Mesh.single(Layout.parse("bf16"), device)
    trainer: Any = synthetic_trainer(shape, "bf16", compile_blocks=compiled, mesh=mesh)
    if graphs and device.startswith("cuda"):
        trainer.task._run_passes = GraphedForwardBackward(trainer.task._launch_passes, trainer.task.passes)
    if "documents" in shape and device.startswith("cuda"):  # for both, as the kernels are then the same
        trainer.task._fixed_documents = FixedDocuments()
    return trainer


def graph_ratio(device: str, shape: dict[str, int], compiled: bool) -> dict[str, Any]:
    """Seconds of a step whose kernels are launched one by one and of one that replays a CUDA graph, with their ratio
    and the peak of reserved memory; whether losses and parameters of two layers after six steps with deterministic
    kernels are equal bit for bit."""
    cuda, found = device.startswith("cuda"), {}
    for name in ("launched", "replayed"):
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        trainer = graph_trainer(device, shape, compiled, name == "replayed")
        found[f"{name}_seconds"] = step_seconds(trainer.step, 4, 8, cuda)
        found[f"{name}_reserved_bytes"] = torch.cuda.max_memory_reserved() if cuda else 0
        del trainer
        free_memory()
    results = []
    with deterministic(True, compiled):
        for graphs in (False, True):
            trainer = graph_trainer(device, {**shape, "layers": 2}, compiled, graphs)
            losses = [trainer.step().loss for _ in range(6)]
            results.append((losses, [shard.master.cpu() for shard in trainer.parallel.shards]))
            del trainer
            free_memory()
    (losses, weights), (replayed, replayed_weights) = results
    same = all(torch.equal(one, other) for one, other in zip(weights, replayed_weights, strict=True))
    found["ratio"] = found["launched_seconds"] / found["replayed_seconds"]
    return {**found, "equal_losses": losses == replayed, "equal_weights": same}


def norm_error(device: str, shape: dict[str, int]) -> dict[str, float]:
    """Relative error of the squared gradient norm in few kernels against one slice after the other, and the seconds of
    both."""
    trainer: Any = synthetic_trainer(
        shape, "bf16", compile_blocks=False, mesh=Mesh.single(Layout.parse("bf16"), device)
    )
    engine = trainer.parallel
    for shard in engine.shards:
        shard.gradient.normal_()

    def one_by_one() -> torch.Tensor:
        """Several kernels for each slice."""
        parts = zip(engine._summed, engine._copies.tolist(), strict=True)
        return torch.stack([_sum_squares(part) / copies for part, copies in parts]).sum()

    together, exact = engine.squared_norm_share(), one_by_one()
    return {
        "error": abs(float(together / exact) - 1),
        "seconds": step_seconds(engine.squared_norm_share, 2, 10, device.startswith("cuda")),
        "one_by_one_seconds": step_seconds(one_by_one, 2, 10, device.startswith("cuda")),
    }


def segments_expand() -> bool:
    """Return True if all memory of the process is in expandable segments."""
    held = torch.empty(1 << 20, device="cuda")
    cuda: Any = torch.cuda
    segments = cuda.memory_snapshot()
    del held
    return bool(segments) and all(segment["is_expandable"] for segment in segments)


def snapshot_is_pinned(device: str, shape: dict[str, int]) -> dict[str, float]:
    """Return whether the buffers of a snapshot are pinned and equal to the state, and the bytes of both."""
    trainer: Any = synthetic_trainer(
        shape, "bf16", compile_blocks=False, mesh=Mesh.single(Layout.parse("bf16"), device)
    )
    slices, buffers = trainer.slices(owned=True), SnapshotBuffers()
    snapshot = buffers.take(slices)
    snapshot.wait()
    return {
        "pinned": all(buffer.is_pinned() for buffer in snapshot.buffers),
        "equal": all(
            torch.equal(copy.tensor, source.tensor.cpu())
            for copy, source in zip(
                snapshot.slices, sorted(slices, key=lambda item: -item.tensor.element_size()), strict=True
            )
        ),
        "bytes": sum(buffer.untyped_storage().nbytes() for buffer in snapshot.buffers),
        "state_bytes": sum(item.tensor.nbytes for item in slices),
    }


def chunked_product(device: str, shape: dict[str, int], ranks: int) -> dict[str, float]:
    """The up projection of one of `ranks` tensor-parallel ranks, for the tokens of all ranks: seconds as one product,
    in chunks as `comm/products.py` multiplies (each the tokens of one rank), and in chunks while another stream copies
    as many bytes as arrive meanwhile; the relative difference between the results. One GPU has no link to another: the
    copies take memory bandwidth, but no time of a link."""
    rows, hidden, width = shape["batch"] * shape["sequence"] // ranks, shape["hidden"], shape["intermediate"]
    cuda = device.startswith("cuda")
    make = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16
    x = torch.randn(ranks, rows, hidden, device=device, generator=make).to(dtype)
    weight = torch.randn(2 * width // ranks, hidden, device=device, generator=make).to(dtype)
    found = {name: torch.empty(ranks, rows, len(weight), device=device, dtype=dtype) for name in ("whole", "chunks")}
    arrived = torch.empty_like(x)
    library: Any = torch.cuda
    stream: Any = library.Stream() if cuda else None

    def whole() -> None:
        """All tokens at once."""
        torch.mm(x.flatten(0, 1), weight.T, out=found["whole"].flatten(0, 1))

    def chunks() -> None:
        """The tokens of each rank in turn."""
        for source in range(ranks):
            torch.mm(x[source], weight.T, out=found["chunks"][source])

    def beside() -> None:
        """In chunks, while the next chunk is copied."""
        if cuda:
            stream.wait_stream(library.current_stream())
        with library.stream(stream):
            arrived[1:].copy_(x[1:])
        chunks()
        if cuda:
            library.current_stream().wait_stream(stream)

    cases = (("whole", whole), ("chunks", chunks), ("chunks_beside_copies", beside))
    seconds = {f"{name}_seconds": step_seconds(run, 3, 10, cuda) for name, run in cases}
    difference = (found["whole"].float() - found["chunks"].float()).norm() / found["whole"].float().norm()
    return seconds | {"difference": float(difference)}


def graph_with_calls(device: str, shape: dict[str, int]) -> dict[str, Any]:
    """Train with layers that make the calls of `tp` over a communicator of one rank, launched and replayed, with
    deterministic kernels. Return: "equal", True if the losses are the same bits; "sites", number of call sites;
    "close_seconds", seconds until the communicators are closed, which wait for graphs."""
    losses: list[list[float]] = []
    cuda = device.startswith("cuda")
    options: dict[str, Any] = {"backend": "nccl", "device_id": torch.device("cuda", 0)} if cuda else {"backend": "gloo"}
    dist.init_process_group(init_method="tcp://localhost:0", rank=0, world_size=1, **options)
    try:
        with deterministic(True, False):
            for graphs in (False, True):
                mesh = Mesh.create(Layout.parse("bf16"), device)
                mesh.communicator.trivial_calls = True
                trainer = graph_trainer(device, shape, False, graphs, mesh)
                losses.append([trainer.step().loss for _ in range(6)])
                sites = len(mesh.record.sites)
                begun = time.perf_counter()
                mesh.close()
    finally:
        dist.destroy_process_group()
    return {"equal": losses[0] == losses[1], "sites": sites, "close_seconds": time.perf_counter() - begun}


def graph_cases(cases: Any, device: str, shapes: dict[str, dict[str, int]]) -> None:
    """Run the cases of CUDA graphs, first a shape whose step the host's launches bound. Arguments: see `step_cases`."""
    first, shape = next(iter(shapes.items()))
    launch_bound = {**shape, "layers": 8, "hidden": 512, "heads": 8, "kv_heads": 8, "intermediate": 1408, "batch": 2}
    launch_bound |= {"sequence": 512}
    title = f"{first}, hidden 512, 8 layers"
    graphs = [(title, launch_bound, False), (f"{title}, packed", {**launch_bound, "documents": 8}, True)]
    graphs *= device.startswith("cuda")  # a minute a step on a CPU
    for name, given, compiled in (*graphs, (first, shape, False)):
        ratio = partial(graph_ratio, device, given, compiled)
        title = f"{name}{', compiled' * compiled}"
        cases.run("CUDA graph", title, ratio, lambda found: found["equal_losses"] and found["equal_weights"])
    less = {**(launch_bound if device.startswith("cuda") else shape), "layers": 2, "sequence": 128}
    called = partial(graph_with_calls, device, less)
    cases.run("CUDA graph", "calls over one rank", called, lambda found: found["equal"] and found["sites"] > 4)


def step_cases(cases: Any, device: str, shapes: dict[str, dict[str, int]]) -> None:
    """Run all of these; on a CPU to try the script. shapes: by name.

    The bound between the errors of both products is wide: a tensor core cuts off low bits of the sum at each of its
    additions, so that the error of a float32 sum grows with the number of tokens; rounding to bf16 alone makes 1e-3."""
    cuda = device.startswith("cuda")
    if cuda:
        cases.run("checks", "all memory is in expandable segments", segments_expand, bool)
    for name, shape in shapes.items():
        wide = partial(wide_gradients, device, shape)
        cases.run("weight gradients", name, wide, lambda found: found["inside_error"] < 1e-4 < found["after_error"])
        less = {**shape, "layers": 2}
        for ranks in (2, 4, 8):
            chunked = partial(chunked_product, device, shape, ranks)
            cases.run("product in chunks", f"{name}, tp{ranks}", chunked, lambda found: found["difference"] < 1e-2)
        norm = partial(norm_error, device, less)
        cases.run("gradient norm", f"{name}, 2 layers", norm, lambda found: found["error"] < 1e-6)
    first, shape = next(iter(shapes.items()))
    cases.run("input", first, partial(prefetch_seconds, device, shape))
    pinned = partial(snapshot_is_pinned, device, {**shape, "layers": 1})
    cases.run(
        "snapshot", f"{first}, 1 layer", pinned,
        lambda found: found["pinned"] == cuda and found["equal"] and found["bytes"] == found["state_bytes"],
    )  # fmt: skip
