"""Training engines (frameworks) whose kernels, buffers and overlap are priced: the properties that decide the cost of a
step.

What is not said of an engine here is the same for all: the model's mathematics, the layout, the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from meshwright.errors import UserError
from meshwright.names import unknown
from meshwright.spec.config import ModelConfig
from meshwright.spec.stages import Stage, even_stages, stages_of

Fusion = Literal["eager", "kernels", "compiled"]
AttentionKernel = Literal["scores", "tiled", "flash-1", "flash-2", "flash-3"]


@dataclass(frozen=True, slots=True)
class Engine:
    """Properties of a training engine (framework) that decide its kernels, buffers and overlap, for predictions.

    Attributes:
        name: Such as "megatron".
        source: Where the properties are documented.
        fusion: Of elementwise operations. "eager": each is a kernel; "kernels": norms, activations, rotary positions
            and the softmax are one kernel each; "compiled": everything between two matrix products is about one kernel.
        fuses_gates: False if the activation of a gated MLP and its product are kernels of their own under "kernels".
        attention: "scores": attention scores are written to memory; else the generation of the flash kernel.
        hopper_attention: Attention kernel on Hopper and later devices, if it differs; None: the same.
        dropout: True if the engine's published runs had dropout.
        selective: What selective recomputation repeats. "core": attention's scores, softmax and product with values;
            "elementwise": everything between matrix products; "every second product": elementwise operations and every
            second matrix product of a block, but not the core; "up-projections": those of latent attention, rotary
            positions, norms and activations.
        stops_early: True if a recomputed block omits a last matrix product whose result the backward does not need.
        loss_bytes: Bytes read and written for each logit by the loss, forward and backward together.
        loss_holds: Bytes allocated for each logit, without the logit itself, while the loss is computed.
        compiles_loss: True if the loss is compiled where blocks are.
        wide_parameters: True if only float32 parameters are persistent, without a copy in the narrow type.
        gradient_bytes: Bytes of an element of gradients that are summed over micro-batches and ranks.
        reduced_bytes: Bytes of an element of gradients on their way between ranks; None: `gradient_bytes`.
        narrow_states: True if optimizer states and parameters are narrow, without float32 masters, where gradients are.
        accumulates: How weight gradients are added to their sum: "fused": by the matrix product; "added": by a kernel
            after it; "copied": by a copy into the communication buffer.
        overlaps_data: True if gradient reductions over data-parallel ranks overlap the backward pass. ZeRO-3's
            parameter all-gathers overlap computation in every engine.
        overlaps_gathers: True if ZeRO-1's all-gathers of updated parameters overlap the first forward.
        holds_in_pipelines: True if ZeRO-2 and ZeRO-3 under a pipeline gather parameters and reduce gradients only once
            a step.
        even_stages: True if pipeline stages have equal numbers of layers, whatever embedding and head cost; else their
            FLOPs are balanced.
        bucket_bytes: Largest message of gradient reductions and of ZeRO-1's all-gathers; None: one call a layer.
        host_seconds: Time of the host to issue one operation. A micro-batch takes at least as long as the host needs
            for its operations.
        dispatches_by_node: True if a token is sent once to each node that has experts of its choice (once to each rank,
            if all are on one node), not once to each expert.
        overlap_processors: Share of a device's multiprocessors that dispatch and combine of tokens occupy while they
            overlap the computation of another micro-batch; None: nothing is computed beside them.
        eight_bit_activations: True if fp8 training sends tokens to experts, and saves activations, in 8 bits.
        overlaps_tensor: What tp collectives overlap. "weights": reductions of input gradients overlap the weight
            gradients of the same product; "products": in addition, all overlap, in slices, the products that they feed
            or follow; None: nothing.
        scatters: True if each tp rank sends a slice of the activations to the next stage and the slices are gathered
            there (arXiv:2104.04473, section 4.1).
        axes, schedules, zero: Axes of the layout (in addition to data parallelism), pipeline schedules and ZeRO stages
            from which a search may choose.
    """

    name: str
    source: str
    fusion: Fusion = "eager"
    fuses_gates: bool = True
    attention: AttentionKernel = "flash-2"
    hopper_attention: AttentionKernel | None = None
    dropout: bool = False
    selective: Literal["core", "elementwise", "every second product", "up-projections"] = "core"
    stops_early: bool = True
    loss_bytes: float = 40.0
    loss_holds: float = 8.0
    compiles_loss: bool = True
    wide_parameters: bool = False
    gradient_bytes: int = 4
    reduced_bytes: int | None = None
    narrow_states: bool = False
    accumulates: Literal["fused", "added", "copied"] = "added"
    overlaps_data: bool = True
    overlaps_gathers: bool = False
    holds_in_pipelines: bool = False
    even_stages: bool = False
    bucket_bytes: float | None = None
    host_seconds: float = 35e-6
    dispatches_by_node: bool = False
    overlap_processors: float | None = None
    eight_bit_activations: bool = False
    overlaps_tensor: Literal["weights", "products"] | None = None
    scatters: bool = False
    axes: tuple[str, ...] = ("tp", "cp", "pp", "ep")
    schedules: tuple[str, ...] = ("1f1b", "interleaved")
    zero: tuple[int, ...] = (0, 1)

    def stages(self, config: ModelConfig, count: int, sequence: int) -> tuple[Stage, ...]:
        """Return the `count` pipeline stages into which the engine cuts a model. sequence: tokens of a sequence."""
        return even_stages(config, count) if self.even_stages else stages_of(config, count, sequence)

    @property
    def activation_fusion(self) -> Fusion:
        """How an MLP's activation is fused: as `fusion`, or "eager"."""
        return "eager" if self.fusion == "kernels" and not self.fuses_gates else self.fusion

    def compiled(self) -> Engine:
        """Return a copy of this engine with blocks compiled by torch.compile."""
        if not self.compiles_loss:
            return replace(self, fusion="compiled")
        holds = min(self.loss_holds, 8.0)
        return replace(self, fusion="compiled", loss_bytes=min(self.loss_bytes, _COMPILED_LOSS), loss_holds=holds)


_MEGATRON_BUCKET = 160e6  # 40 million float32 gradients (megatron/core/distributed)
_DDP_BUCKET = 50e6  # 25 MiB of bf16 gradients, reduced in float32
_COMPILED_LOSS = 12.0  # bf16 logits read for the maxima, for the sums, and read and written for the gradient; a copy

_TORCH_LOSS = 40.0
"""PyTorch's cross-entropy of bf16 logits: to float32 (2 + 4), log-softmax (read twice, written: 12), its backward
(zeros 4, read twice and written: 12) and back to bf16 (4 + 2)."""
_TORCH_HOLDS = 12.0  # of it the float32 copy, the log-softmax and the gradient are there at once

ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            "meshwright",
            "src/meshwright/model: layers.py, attention.py, loss.py, recompute.py",
            selective="elementwise",
            loss_bytes=64.0,  # loss.py, _statistics and _to_gradient_, kernel by kernel
            schedules=(
                *("1f1b", "interleaved", "gpipe", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v"),
                *("interleaved-zb", "dualpipe", "chimera", "gems"),
            ),
            zero=(0, 1, 2, 3),
        ),
        Engine(
            "megatron",
            "NVIDIA/Megatron-LM; Shoeybi et al. 2019 (arXiv:1909.08053); Narayanan et al. 2021 (arXiv:2104.04473, "
            "section 4.2: fused bias-GELU, bias-dropout-add and scale-mask-softmax); Korthikanti et al. 2022 "
            "(arXiv:2205.05198); LinearWithGradAccumulationAndAsyncCommunication; fused attention of Transformer "
            "Engine on Hopper and later",
            fusion="kernels",
            attention="scores",
            hopper_attention="flash-3",
            dropout=True,
            stops_early=False,
            loss_bytes=60.0,  # vocab_parallel_cross_entropy on float32 logits, kernel by kernel
            accumulates="fused",
            overlaps_data=False,
            overlaps_tensor="weights",
            scatters=True,
            bucket_bytes=_MEGATRON_BUCKET,
            even_stages=True,
        ),
        Engine(
            "megatron-core",
            "NVIDIA/Megatron-LM, core with Transformer Engine and flash attention on every device, "
            "--overlap-grad-reduce, --overlap-param-gather, --tp-comm-overlap (on in NVIDIA's own recipes: "
            "NVIDIA/NeMo-Framework-Launcher, overlap_grad_sync, overlap_param_sync, ub_tp_comm_overlap)",
            overlaps_gathers=True,
            fusion="kernels",
            hopper_attention="flash-3",
            stops_early=False,
            loss_bytes=20.0,
            accumulates="fused",
            overlaps_tensor="products",
            scatters=True,
            bucket_bytes=_MEGATRON_BUCKET,
            holds_in_pipelines=True,
            dispatches_by_node=True,
            even_stages=True,
            reduced_bytes=2,  # grad_reduce_in_fp32 = False in the same recipes
        ),
        Engine(
            "hai-llm",
            "DeepSeek-V3's (arXiv:2412.19437): DualPipe, in which dispatch and combine overlap the computation of the "
            "opposite direction's micro-batch on 20 of 132 multiprocessors (sections 3.2.1, 3.2.2); tokens sent once "
            "to each node, in fp8 (3.2.2, 3.3.3); recomputation (3.2.3). Not published, and assumed: fused kernels, "
            "flash-3 on Hopper",
            fusion="kernels",
            hopper_attention="flash-3",
            selective="up-projections",
            dispatches_by_node=True,
            overlap_processors=20 / 132,
            eight_bit_activations=True,
            axes=("pp", "ep"),
            schedules=("dualpipe",),
        ),
        Engine(
            "zero-bubble",
            "sail-sg/zero-bubble-pipeline-parallelism, a fork of Megatron-LM: examples/pretrain_zero_bubble.sh "
            "(--use-flash-attn, dropout at its default); Qi et al. 2023 (arXiv:2401.10241)",
            fusion="kernels",
            dropout=True,
            stops_early=False,
            loss_bytes=60.0,
            accumulates="fused",
            overlaps_data=False,
            overlaps_tensor="weights",
            scatters=True,
            schedules=("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min"),
            bucket_bytes=_MEGATRON_BUCKET,
            even_stages=True,
        ),
        Engine(
            "megatron-deepspeed",
            "bigscience-workshop/Megatron-DeepSpeed (BLOOM: arXiv:2211.05100, section 3.4)",
            fusion="kernels",
            attention="scores",
            hopper_attention="flash-2",
            dropout=True,
            stops_early=False,
            loss_bytes=60.0,
            overlaps_data=False,
            axes=("tp", "pp"),
            bucket_bytes=_MEGATRON_BUCKET,
            even_stages=True,
        ),
        Engine(
            "torchtitan",
            "pytorch/torchtitan: FSDP2 with bf16 parameters and float32 reduction, scaled_dot_product_attention "
            "(arXiv:2410.06511); selective_ac_option op; fsdp_reshard_after_forward default",
            holds_in_pipelines=True,
            wide_parameters=True,
            selective="every second product",
            loss_bytes=_TORCH_LOSS,
            loss_holds=_TORCH_HOLDS,
            accumulates="copied",
            schedules=("1f1b", "interleaved", "gpipe", "zb-v", "dualpipe-v"),
            zero=(0, 3),
            even_stages=True,
            compiles_loss=False,
        ),
        Engine(
            "llm-foundry",
            "mosaicml/llm-foundry, scripts/train/benchmarking: FSDP, bf16 throughout (PURE), the Triton kernel of "
            "flash attention 1, no dropout, no biases",
            attention="flash-1",
            loss_bytes=_TORCH_LOSS,
            loss_holds=_TORCH_HOLDS,
            gradient_bytes=2,
            accumulates="copied",
            axes=(),
            zero=(0, 3),
            narrow_states=True,
        ),
        Engine(
            "maxtext",
            "AI-Hypercomputer/maxtext and google/paxml on GPUs: XLA, flash attention of Transformer Engine "
            "(NVIDIA/JAX-Toolbox, rosetta/projects/maxtext), latency-hiding scheduler",
            fusion="compiled",
            hopper_attention="flash-3",
            loss_bytes=_COMPILED_LOSS,
            wide_parameters=True,
            selective="elementwise",
            overlaps_gathers=True,
            axes=("tp", "cp", "ep", "pp"),
            zero=(0, 3),
            host_seconds=0.0,
        ),
        Engine(
            "nanotron",
            "huggingface/nanotron: flash attention 2, Triton norms, float32 gradient sums; its pipeline engines are "
            "AllForwardAllBackward and OneForwardOneBackward",
            schedules=("1f1b", "gpipe"),
            fusion="kernels",
            overlaps_data=False,  # trainer.py, make_ddp: no DistributedDataParallel under ZeRO-1; without, as slow
            fuses_gates=False,  # nn/activations.py and GLUActivation: act(gate) * up
            stops_early=False,
            loss_bytes=60.0,
            bucket_bytes=_DDP_BUCKET,
            host_seconds=95e-6,
        ),
        Engine(
            "deepspeed",
            "microsoft/DeepSpeed ZeRO on eager PyTorch models: gradients summed in the type of the parameters",
            loss_bytes=_TORCH_LOSS,
            loss_holds=_TORCH_HOLDS,
            gradient_bytes=2,
            accumulates="copied",
            axes=(),
            zero=(0, 1, 2, 3),
            bucket_bytes=1e9,
        ),
    )
}


def engine(name: str | Engine, *, compile: bool = False) -> Engine:
    """Return the training engine called `name`, such as "megatron", or the given engine. compile: with compiled blocks.
    Raises `UserError` with the most similar name for an unknown one."""
    if isinstance(name, str):
        if name not in ENGINES:
            raise UserError(unknown("engine", name, ENGINES))
        name = ENGINES[name]
    return name.compiled() if compile else name
