"""Training engines (frameworks) whose kernels, buffers and overlap are priced (`engines.toml`): the properties that
decide the cost of a step beside the model's mathematics, the layout and the machine."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Literal

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


_COMPILED_LOSS = 12.0  # bf16 logits read for the maxima, for the sums, and read and written for the gradient; a copy


def _engines() -> dict[str, Engine]:
    """Return the engines of engines.toml by name."""
    text = resources.files("meshwright.planner.cost").joinpath("engines.toml").read_text(encoding="utf-8")
    tables: dict[str, dict[str, Any]] = {
        name: {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
        for name, table in tomllib.loads(text).items()
    }
    return {name: Engine(name, **table) for name, table in tables.items()}


ENGINES = _engines()


def engine(name: str | Engine, *, compile: bool = False) -> Engine:
    """Return the training engine called `name`, such as "megatron", or the given engine. compile: with compiled blocks.
    Raises `UserError` with the most similar name for an unknown one."""
    if isinstance(name, str):
        if name not in ENGINES:
            raise UserError(unknown("engine", name, ENGINES))
        name = ENGINES[name]
    return name.compiled() if compile else name
