"""A training step on a CUDA device that is not there: the real engine on tensors that have sizes and no memory, each
storage watched from the operator that makes it to its last reference.

    LD_PRELOAD=... python -m bench.shared.cuda_cases < cases.json

Reads a list of `CudaStep` from standard input and answers a line of JSON for each (`measured`, `Measured`). A process
of its own: the library that lets PyTorch's CPU build do this (`preload`) has to be there before PyTorch is.

Operators that PyTorch chooses by the device are chosen here as its sources choose them (`attention_kernel`), and what
its kernels take inside, which no tensor shows, is added from their sources (`INSIDE`).
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("cuda_without_gpu.cpp")
BLOCK = 512
"""Bytes that the CUDA caching allocator rounds up to (c10/core/AllocatorConfig.h, `kMinBlockSize`)."""


class CudaStep(NamedTuple):
    """`batch` rows over all ranks, seen by `rank`. model: a preset, `change`d; documents: in a row. hopper: whether
    the device is of compute capability 9 or 10: then cuDNN's kernel for attention comes first."""

    model: str
    layout: str = "bf16"
    batch: int = 4
    sequence: int = 64
    change: dict[str, Any] = {}
    rank: int = 0
    optimizer: str = "adamw"
    documents: int = 1
    hopper: bool = False
    saved: bool = False  # whether to compare what one forward keeps, tensor by tensor
    overlap: str = "off"  # of tensor-parallel products with their collectives
    graphs: bool = False  # whether forward and backward are captured in the third step; the fourth is then measured


class Measured(NamedTuple):
    """Bytes: at most in the second step, between steps, what the ledger says of both. alive: at the step's highest
    moment bytes, how many and what made them, the largest first; items: what the ledger has at its own. unexpected:
    sizes that a forward keeps and the ledger does not, by what made them; missing: the other way round. host_waits:
    places in the source where the host waits for the device, in forward, backward and update of the second step, each
    as often as it waits."""

    peak: int
    between: int
    predicted: int
    predicted_between: int
    moment: str
    alive: list[tuple[int, int, str]]
    items: list[tuple[int, str]]
    unexpected: list[tuple[int, str]] = []
    missing: list[tuple[int, str]] = []
    host_waits: list[str] = []

    @property
    def error(self) -> float:
        return self.predicted / self.peak - 1


class NoCompiler(Exception):
    """There is nothing to compile the library with."""


def preload() -> Path:
    """The library, compiled once for this source and this PyTorch. `NoCompiler` where that cannot be."""
    import torch

    compiler = os.environ.get("CXX", "g++")
    place = Path(torch.__file__).parent
    key = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {place}".encode()).hexdigest()[:16]
    found = Path(tempfile.gettempdir()) / f"meshwright-cuda-without-gpu-{os.getuid()}-{key}.so"
    if not found.exists():
        partial = found.with_suffix(f".{os.getpid()}")
        options = ["-std=c++20", "-O0", "-fPIC", "-shared", f"-I{place}/include", f"-L{place}/lib"]
        command = [
            compiler,
            *options,
            str(SOURCE),
            "-o",
            str(partial),
            "-lc10",
            "-ltorch_cpu",
            f"-Wl,-rpath,{place}/lib",
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise NoCompiler(f"{compiler} is not there") from error
        if done.returncode:
            raise NoCompiler(f"{compiler}: {done.stderr[-2000:]}")
        partial.rename(found)
    return found


def measured(cases: Sequence[CudaStep]) -> Iterator[Measured]:
    """Each case in its turn, all in one process of their own."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "LD_PRELOAD": str(preload()), "PYTHONPATH": os.pathsep.join(paths)}
    given = json.dumps([case._asdict() for case in cases])
    command = [sys.executable, "-m", "bench.shared.cuda_cases"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(given)
        process.stdin.close()
        for line in process.stdout:
            yield Measured(**json.loads(line))
    if process.returncode:
        raise RuntimeError(f"a step on a CUDA device that is not there ended with {process.returncode}")


# --- in the process of its own

if __name__ == "__main__":
    import dataclasses

    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch._library.custom_ops import OPDEFS
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
    from torch.utils._python_dispatch import TorchDispatchMode

    from bench.shared.saved_cases import Case, Watched, difference, list_tensors, watch
    from meshwright.adapters.attach import attach_adapters
    from meshwright.comm import transport
    from meshwright.comm.mesh import CommunicationState, Mesh
    from meshwright.layout import Layout
    from meshwright.model import grouped_product, varlen_attention
    from meshwright.model.documents import Documents
    from meshwright.model.transformer import Transformer
    from meshwright.parallel import expert, ring_spans
    from meshwright.parallel.context import shard_sequences
    from meshwright.parallel.parallelize import build_axes
    from meshwright.parallel.step import ForwardBackward, count_targets, loss_share
    from meshwright.parallel.zero_engine import ZeroEngine
    from meshwright.planner.cost.engines import choose_run_engine
    from meshwright.planner.cost.micro_batch import Routed
    from meshwright.planner.memory.ledger import ledger
    from meshwright.quantization import packing
    from meshwright.recipe import TrainRecipe
    from meshwright.spec.adapter_config import AdapterConfig
    from meshwright.spec.config import ModelConfig
    from meshwright.spec.parameters import parameter_table
    from meshwright.spec.partition import Partition
    from meshwright.spec.presets import preset
    from meshwright.spec.stage_times import program_for
    from meshwright.training.cuda_graphs import FixedDocuments, GraphedForwardBackward
    from meshwright.training.precision import PARAMETER_DTYPES
    from meshwright.training.trainer import Trainer

    aten = torch.ops.aten
    OF_CUDA = torch.library.Library("aten", "IMPL", "CUDA")

    def _never(*args: Any, **options: Any) -> None:
        raise AssertionError("tensors without memory never come to a kernel")

    for _operator in ("silu_backward", "mish_backward", "_fused_rms_norm"):
        # Where a device has no kernel of their own, these are made of others; CUDA has one (native_functions.yaml).
        OF_CUDA.impl(_operator, _never)

    def blocks(size: int) -> int:
        return -(-size // BLOCK) * BLOCK

    def up(size: int, multiple: int) -> int:
        return -(-size // multiple) * multiple

    def flash_backward(d_out: Any, q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> list[tuple[str, int]]:
        """mha_bwd (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp): the gradient of queries in
        float32, a number a query, and gradients of keys and values for every query head."""
        rows, heads, length, size = q.shape
        length, wide = up(length, 128), up(size, 32)
        sums = [("softmax_d", 4 * rows * heads * length), ("dq_accum", 4 * rows * length * heads * wide)]
        grouped = 0 if k.shape[1] == heads else 2 * rows * k.shape[2] * heads * size * q.element_size()
        return [*sums, ("dk_expanded, dv_expanded", grouped)]

    def efficient_backward(d_out: Any, q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> list[tuple[str, int]]:
        """_efficient_attention_backward (aten/src/ATen/native/transformers/cuda/attention_backward.cu): a number a
        query; of narrow types the gradient of queries in float32, of wide ones what that number is the sum of."""
        rows, heads, length, size = q.shape
        return [("delta", 4 * rows * heads * up(length, 32)), ("workspace", 4 * rows * heads * length * size)]

    def varlen_backward(
        d_out: Any, q: Any, k: Any, v: Any, out: Any, log_sum: Any, cu_seqlens: Any, *rest: Any, **options: Any
    ) -> list[tuple[str, int]]:
        """mha_varlen_bwd (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp): as mha_bwd, with 128 more
        queries for each document. What is not contiguous is copied (attention_backward.cu)."""
        copies = [("out, d_out", each.nbytes) for each in (d_out, out) if not each.is_contiguous()]
        if cu_seqlens is None:
            return [*copies, *flash_backward(*(each.transpose(1, 2) for each in (d_out, q, k, v)))]
        tokens, heads, size = q.shape
        lines = tokens + 128 * (len(cu_seqlens) - 1)
        sums = [("softmax_d", 4 * heads * lines), ("dq_accum", 4 * lines * heads * up(size, 32))]
        grouped = 0 if k.shape[1] == heads else 2 * k.shape[0] * heads * size * q.element_size()
        return [*copies, *sums, ("dk_expanded, dv_expanded", grouped)]

    INSIDE = {
        aten._flash_attention_backward.default: varlen_backward,
        aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
        aten._scaled_dot_product_cudnn_attention_backward.default: flash_backward,  # its own size is not published
        aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
    }

    def attention_kernel(q: Any, k: Any, mask: Any, hopper: bool) -> str:
        """As `select_sdp_backend` of torch 2.13 chooses (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""
        narrow, size = q.dtype in (torch.bfloat16, torch.float16), q.shape[-1]
        if hopper and narrow and size % 8 == 0 and size <= 128:
            return "cudnn"
        if narrow and mask is None and size <= 256:
            return "flash"
        aligned = size % (8 if narrow else 4) == 0
        return "efficient" if q.dtype != torch.float64 and aligned and q.shape[1] == k.shape[1] else "math"

    def attention(hopper: bool) -> Any:
        """`F.scaled_dot_product_attention` on CUDA (aten/src/ATen/native/transformers/attention.cpp)."""
        math = F.scaled_dot_product_attention

        def attend(
            q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
            scale: float | None = None, enable_gqa: bool = False,
        ) -> Any:  # fmt: skip
            kernel = attention_kernel(q, k, attn_mask, hopper)
            added = attn_mask
            if attn_mask is not None and attn_mask.dtype == torch.bool and kernel != "math":
                # `convert_boolean_attn_mask`: numbers to be added; the memory-efficient kernel takes them aligned.
                added = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(attn_mask.logical_not(), -1e30)
            needed = any(each.requires_grad for each in (q, k, v))
            if kernel == "cudnn":
                operator = aten._scaled_dot_product_cudnn_attention
                return operator(q, k, v, added, needed, 0.0, is_causal, False)[0]
            if kernel == "flash":
                pad = -q.shape[-1] % 8
                q, k, v = (F.pad(each, (0, pad)) if pad else each for each in (q, k, v))
                out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False)[0]
                return out[..., : out.shape[-1] - pad] if pad else out
            if kernel == "efficient":
                if added is not None:
                    added = added.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
                return aten._scaled_dot_product_efficient_attention(q, k, v, added, needed, 0.0, is_causal)[0]
            return math(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

        return attend

    class Allocator(TorchDispatchMode):
        """Bytes of CUDA storages as the allocator counts them: from the operator that makes one to its last reference.

        Our own operators are run as they are written, not as they are described. A number that the host asks for is 1:
        tensors without memory have none."""

        def __init__(self, cublas: int, streams: int) -> None:
            super().__init__()
            self.now = self.peak = 2 * cublas * streams
            # A handle of each thread, the caller's and the one of autograd, has one on each stream
            # (CublasHandlePool.cpp): a graph is captured on a separate stream.
            self.alive = {-1 - at: (cublas, f"cuBLAS, {at}") for at in range(2 * streams)}
            self.host_waits: list[str] = []
            self.highest: dict[int, tuple[int, str]] = {}
            self.inside: list[tuple[str, int]] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if self._waits_for(function, args, kwargs):
                self.host_waits.append(_place_in_source())
            if function in (aten._local_scalar_dense.default, aten.item.default):
                return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
            if function.namespace == "meshwright":
                with self, torch.no_grad():
                    return OPDEFS[function._schema.name]._init_fn(*args, **kwargs)
            result = function(*args, **kwargs)
            name = str(function)
            for value in list_tensors([result]):
                self.note(value, f"{name} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}")
            if function in INSIDE:
                inside = [each for each in INSIDE[function](*args, **kwargs) if each[1]]
                self.reach(inside)
            return result

        def _waits_for(self, function: Any, args: Any, kwargs: Any) -> bool:
            """Whether the host waits for the device in this call: it reads a number or a size that only the device
            knows, or copies between them without pinned memory."""
            tensors = list(list_tensors(args))
            on_device = any(each.device.type == "cuda" for each in tensors)
            if function in WAITING:
                return on_device
            if function is aten._to_copy.default:
                to = kwargs.get("device")
                moved = to is not None and torch.device(to).type != args[0].device.type
                return moved and not kwargs.get("non_blocking", False)
            if function is aten.copy_.default:
                moved = args[0].device.type != args[1].device.type
                return moved and not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            return False

        def note(self, value: torch.Tensor, name: str) -> None:
            if value.device.type != "cuda":
                return
            storage = value.untyped_storage()
            key = storage._cdata
            if key in self.alive:
                return
            size = blocks(storage.nbytes())
            self.alive[key] = size, name
            self.now += size
            weakref.finalize(storage, self.gone, key).atexit = False
            self.reach()

        def gone(self, key: int) -> None:
            self.now -= self.alive.pop(key)[0]

        def resized(self, storage: Any) -> None:
            if storage._cdata in self.alive:
                size, name = self.alive[storage._cdata]
                new = blocks(storage.nbytes())
                self.alive[storage._cdata] = new, name
                self.now += new - size
                self.reach()

        def reach(self, inside: Sequence[tuple[str, int]] = ()) -> None:
            now = self.now + sum(blocks(size) for _, size in inside)
            if now > self.peak:
                self.peak, self.highest, self.inside = now, dict(self.alive), list(inside)

        def by_operator(self) -> list[tuple[int, int, str]]:
            """Bytes, how many, and what made them, at the highest moment."""
            found: dict[str, tuple[int, int]] = {}
            for size, name in [*self.highest.values(), *((blocks(size), name) for name, size in self.inside)]:
                before, count = found.get(name, (0, 0))
                found[name] = before + size, count + 1
            return sorted(((size, count, name) for name, (size, count) in found.items()), reverse=True)

    WAITING = (aten._local_scalar_dense.default, aten.item.default, aten.nonzero.default, aten.masked_select.default)

    def _place_in_source() -> str:
        """The line of the engine that is being run, such as "model/rope.py: look_up"."""
        for frame in reversed(traceback.extract_stack()):
            _, found, rest = frame.filename.partition("/src/meshwright/")
            if found:
                return f"{rest}: {frame.name}"
        return "elsewhere"

    class Work:
        """A call of NCCL under way: it holds its tensors until somebody waits (TORCH_NCCL_AVOID_RECORD_STREAMS)."""

        def __init__(self, *tensors: Any) -> None:
            self.tensors: tuple[Any, ...] = tensors

        def wait(self, *_: Any) -> None:
            self.tensors = ()

    @contextmanager
    def nccl() -> Iterator[None]:
        """What `comm/` calls of torch.distributed, with nobody on the other side."""

        def posted(*tensors: Any, **_: Any) -> Work:
            return Work(*(each for each in tensors if isinstance(each, torch.Tensor)))

        def exchanged(ends: Sequence[Any]) -> list[Work]:
            return [Work(*(tensor for _, tensor, *_ in ends))]

        def event(enable_timing: bool) -> Any:
            return mock.Mock(**{"elapsed_time.return_value": 1.0})

        calls = {"all_reduce": posted, "broadcast": posted, "all_to_all_single": posted, "barrier": posted}
        with (
            mock.patch.multiple(dist, **calls, batch_isend_irecv=exchanged, P2POp=lambda *end: end),
            mock.patch.object(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl"),
            mock.patch.multiple(torch.cuda, current_stream=mock.DEFAULT, Event=event),
            mock.patch.multiple(transport, native_reduce_scatter=posted, native_all_gather=posted),
        ):
            yield

    @contextmanager
    def cuda_of(watch: Allocator, mesh_of: Callable[..., Mesh], case: CudaStep, routed: Routed) -> Iterator[None]:
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            found = resize(storage, size)
            watch.resized(storage)
            return found

        swap = torch._C.StorageBase._swap_data_ptr_

        def swapped(storage: Any, other: Any) -> None:
            """One of them has no memory: the other's passes to it, which no allocator sees."""
            swap(storage, other)
            for each in sorted((storage, other), key=lambda each: each.nbytes()):
                watch.resized(each)

        def evenly(ends_E: torch.Tensor) -> Iterator[tuple[int, slice]]:
            rows = routed.computed
            for at in range(len(ends_E)):
                yield at, slice(at * rows // len(ends_E), (at + 1) * rows // len(ends_E))

        find_lengths, list_kernel_calls = varlen_attention.find_lengths, ring_spans.list_kernel_calls

        def lengths_of_case(starts_BXC: torch.Tensor, held: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
            """The host reads real lengths: those of the case."""
            rows, chunks, chunk = starts_BXC.shape
            with unset_fake_temporarily():
                each = chunks * chunk // case.documents
                starts = (torch.arange(chunks * chunk) // each * each).expand(rows, -1)
                cu_seqlens, lengths = find_lengths(starts.unflatten(1, (chunks, chunk)), held)
            return torch.empty(cu_seqlens.shape, dtype=torch.int32), lengths

        def pieces(*arguments: Any) -> Any:
            with unset_fake_temporarily():
                return list(list_kernel_calls(*arguments))

        def causal_call(q: torch.Tensor, tensors: list[torch.Tensor], window: int, scale: float | None) -> Any:
            """As with lengths that the host reads from its own memory."""
            if tensors:
                cu_seqlens, lengths = tensors
                with unset_fake_temporarily():
                    longest = int(lengths[0])
                return varlen_attention.FlashCall(cu_seqlens[0], longest, True, window - 1 if window else None, scale)
            return plain_call(q, tensors, window, scale)

        plain_call = varlen_attention._make_causal_call

        def aminmax(tensor: torch.Tensor) -> tuple[int, int]:
            """Bounds of the first visible keys of a tile's queries: as if a document began within each tile."""
            if tensor.is_cuda:
                tensor.flatten()[0].item()
            return 0, 1

        def unpinned(make: Any) -> Any:
            """Return the function `make`, which makes a tensor, for host memory that no GPU reads."""
            return lambda *given, pin_memory=False, **options: make(*given, **options)

        def read_on_host(*vectors: torch.Tensor) -> list[list[int]]:
            """As if routers had chosen all experts equally often."""
            torch.cat(vectors)[0].item()
            ep, rows = len(vectors[0]), routed.arrived
            each = [rows // ep] * ep
            return [each, each, [rows] * len(vectors[2]), *([0] * len(wrong) for wrong in vectors[3:])]

        with ExitStack() as stack:
            enter = stack.enter_context
            enter(mock.patch.object(torch.UntypedStorage, "resize_", resized))
            enter(mock.patch.object(torch.UntypedStorage, "_swap_data_ptr_", swapped))
            enter(mock.patch.object(F, "scaled_dot_product_attention", attention(case.hopper)))
            enter(mock.patch.object(torch.Tensor, "data_ptr", lambda tensor: _address(tensor)))
            enter(mock.patch.object(grouped_product, "_iterate_expert_slices", evenly))
            enter(mock.patch.object(expert, "read_on_host", read_on_host))
            enter(mock.patch.object(ring_spans, "list_kernel_calls", pieces))
            lengths = {"find_lengths": lengths_of_case, "_make_causal_call": causal_call}
            enter(mock.patch.multiple(varlen_attention, **lengths))
            enter(mock.patch.object(Mesh, "create", mesh_of))
            enter(mock.patch.multiple(torch.Tensor, pin_memory=lambda tensor: tensor, aminmax=aminmax))
            enter(mock.patch.multiple(torch, tensor=unpinned(torch.tensor), empty_like=unpinned(torch.empty_like)))
            enter(nccl())
            yield

    def _address(tensor: torch.Tensor) -> int:
        """Of a tensor without memory: another one for each place of each storage."""
        return (tensor.untyped_storage()._cdata << 48) + tensor.storage_offset() * tensor.element_size()

    def configured(case: CudaStep) -> ModelConfig:
        change = dict(case.change)
        if "adapter" in change:
            settings = change["adapter"]
            change["adapter"] = AdapterConfig(**settings | {"targets": tuple(settings["targets"])})
        return dataclasses.replace(preset(case.model), **change)

    def forward(case: CudaStep, config: ModelConfig, layout: Layout) -> Watched:
        """What one forward keeps, as `watch` finds it on a CPU."""
        documents = [at * case.sequence // case.documents for at in range(case.documents)]
        rows = case.batch // (layout.dp * layout.micro_batches)
        precision = layout.precision or "fp32"
        found = watch(
            Case(
                config, case.layout, rows, case.sequence, str(PARAMETER_DTYPES[precision]).removeprefix("torch."),
                starts=None if case.documents == 1 else [documents] * rows, device="cuda", overlap=case.overlap,
            )
        )  # fmt: skip
        states = re.compile(r"aten::_scaled_dot_product_\w+ \(2?,?\) ")  # of random numbers, described as elsewhere
        return found._replace(
            alive=[each for each in found.alive if not states.match(each[1])],
            predicted=[each for each in found.predicted if not each.name.endswith("random_state")],
        )

    def step(case: CudaStep) -> Measured:
        gc.collect()
        packing._build_nf4_tables.cache_clear()  # made under another fake mode
        packing._build_nf4_pairs.cache_clear()
        layout, config = Layout.parse(case.layout), configured(case)
        predicted = ledger(
            config, layout, batch=case.batch, sequence=case.sequence, optimizer=case.optimizer, rank=case.rank,
            documents=case.documents > 1, device="cuda", architecture="Hopper" if case.hopper else "Ampere",
            graphs=case.graphs, engine=choose_run_engine(case.overlap, "cuda", compile=False),
        )  # fmt: skip
        device = torch.device("cuda", 0)
        allocator = Allocator((32 << 20) if case.hopper else 8519680, 1 + case.graphs)
        rows = case.batch // (layout.dp * layout.micro_batches)
        spread = layout.expert_parallel
        copies = rows * case.sequence // layout.cp // (layout.tp if spread else 1) * config.experts_per_token
        routed = Routed(copies, copies * (layout.etp if spread else 1))

        def mesh_of(layout: Layout, *_: Any) -> Mesh:
            return Mesh(layout, case.rank, device, CommunicationState(device), lambda *_: None)

        with FakeTensorMode(), allocator, cuda_of(allocator, mesh_of, case, routed):
            mesh = mesh_of(layout)
            mesh.communicator.product_overlap = case.overlap
            table = parameter_table(config)
            program = program_for(layout, config, case.sequence)
            partition = Partition.of(program, config, table, case.sequence)
            dtype = PARAMETER_DTYPES[layout.precision or "fp32"]
            axes = build_axes(mesh)
            stages = partition.stages_on(mesh.pp.rank)
            model = Transformer(config, axes=axes, device="meta", dtype=dtype, stages=stages)
            attach_adapters(model, table, layout, axes.tensor, device="meta", dtype=dtype)
            parallel = ZeroEngine(model, table, mesh, seed=None, parameter_dtype=dtype, partition=partition)
            train = TrainRecipe(steps=3, batch=case.batch, learning_rate=1e-3, optimizer=case.optimizer)
            passes = ForwardBackward(model, parallel, program)
            latest: list[Any] = []
            fixed = FixedDocuments()

            def run(*given: Any) -> torch.Tensor:
                """Run forward and backward; a replay, whose pool keeps the memory of the captured step, runs them on
                what that step was given."""
                latest[:] = given
                return passes.train(*given)

            graph = SimpleNamespace(replay=lambda: run(*latest))
            capture = mock.patch.multiple(torch.cuda, CUDAGraph=lambda: graph, graph=lambda *_, **__: nullcontext())
            launch: Any = GraphedForwardBackward(run, passes) if case.graphs else passes.train

            def load() -> list[Any]:
                """Return the micro-batches of a step."""
                loaded = []
                for _ in range(layout.micro_batches):
                    parts = [torch.empty(rows, case.sequence, dtype=torch.int64, device=device) for _ in range(2)]
                    documents = Documents()
                    if config.adapter and config.adapter.dropout:
                        documents = Documents(samples_B=torch.empty(rows, dtype=torch.int64, device=device))
                    if case.documents > 1:
                        documents = Documents(torch.zeros(rows, case.sequence, dtype=torch.int64)).to(device)
                        documents = fixed.fix(documents, parts[0]) if case.graphs else documents
                    loaded.append(shard_sequences(*parts, documents, mesh))
                return loaded

            task: Any = SimpleNamespace(
                recipe=SimpleNamespace(train=train), layout=layout, mesh=mesh, parallel=parallel, passes=passes,
                load_step=lambda step: micro_batches, prefetch_step=lambda step: None,
                count_terms=lambda given: count_targets([each.targets_BS for each in given], mesh),
                forward_backward=lambda *given: loss_share(launch(*given), mesh)[None],
            )  # fmt: skip
            trainer = Trainer(task)

            def once() -> None:
                trainer.launch_step()
                trainer._outcomes.clear()  # the host waits for it when it reads it
                parallel.begin_step(0)

            micro_batches = load()
            once()  # makes optimizer state and tables
            if case.graphs:
                once()
                with capture:
                    once()
                micro_batches = load()  # in addition to those that the graph reads
            gc.collect()
            between, allocator.peak = allocator.now, 0
            allocator.host_waits.clear()
            once()
            peak, highest = allocator.peak, allocator.by_operator()
            waits = sorted(allocator.host_waits)
            latest.clear()
            del micro_batches, model, parallel, passes, launch, task, trainer
            kept = forward(case, config, layout) if case.saved else None
        items = sorted(((each.bytes, f"{each.category} {each.name}") for each in predicted.items), reverse=True)
        unexpected, missing = difference(kept) if kept else ([], [])
        return Measured(
            peak,
            between,
            predicted.peak_bytes,
            predicted.between_steps,
            predicted.peak_snapshot,
            highest[:60],
            items[:60],
            unexpected,
            [(each.bytes, each.name) for each in missing],
            waits,
        )

    import torch._dynamo  # which the first step would import: not here, it would not be frozen

    gc.freeze()  # modules, which each collection would look through
    for given in json.load(sys.stdin):
        print(json.dumps(step(CudaStep(**given))._asdict()), flush=True)
