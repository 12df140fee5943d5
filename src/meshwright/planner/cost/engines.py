"""Training engines (frameworks) whose kernels, buffers and communication overlap are modelled (`engines.toml`):
properties that decide the cost of a step in addition to the model, the layout and the machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from meshwright.errors import UserError
from meshwright.names import unknown
from meshwright.spec.config import ModelConfig
from meshwright.spec.stages import Stage, cut_into_even_stages, cut_into_stages, cut_past_shares
from meshwright.toml import read_packaged_toml

Fusion = Literal["eager", "kernels", "compiled"]
AttentionKernel = Literal["scores", "tiled", "flash-1", "flash-2", "flash-3", "sdpa"]


@dataclass(frozen=True, slots=True)
class Engine:
    """Properties of a training engine (framework) from which its kernels, buffers and communication overlap are
    predicted.

    Attributes:
        name: Such as "megatron".
        source: Reference that documents the properties.
        fusion: Fusion of elementwise operations. "eager": each is a kernel; "kernels": norms, activations, rotary
            positions and the softmax are one kernel each; "compiled": everything between two matrix products is about
            one kernel.
        fuses_gates: False if, under "kernels", a gated MLP's activation and its multiplication by the gate are separate
            kernels.
        attention: Attention kernel. "scores": unfused, the scores are written to memory; else the generation of the
            flash kernel.
        hopper_attention: Attention kernel on Hopper and later devices; None: the same as `attention`.
        dropout: True if the engine's published runs had dropout.
        selective: Operations that selective recompute repeats. "core": attention's scores, softmax and product with
            values; "elementwise": everything between matrix products; "every second product": elementwise operations
            and every second matrix product of a layer, but not the core; "up-projections": those of latent attention,
            rotary positions, norms and activations.
        stops_early: True if the recomputation of a layer omits its last matrix product where the backward does not need
            the result.
        loss_bytes: Bytes read and written for each logit by the loss, forward and backward together.
        loss_holds: Bytes allocated for each logit, without the logit itself, while the loss is computed; -2 if logits
            are never in memory all at once.
        gathers_logits: True if each tp rank has all columns of the logits for the loss.
        compiles_loss: True if the loss is compiled where layers are.
        wide_parameters: True if persistent parameters are float32 only, and 16-bit copies are temporary.
        gradient_bytes: Bytes of an element of the gradients that are accumulated over micro-batches and reduced between
            ranks.
        held_gradient_bytes: Bytes of an element of these gradients in the memory ledger, which assumes the wider ones
            of runs without the options of published recipes; None: `gradient_bytes`.
        saves: Activations that a layer saves for the backward: the list of memory/published.toml.
        holds_gradients: True if ZeRO-2 and ZeRO-3 reduce gradients once a step only, so that each rank holds them
            unsharded while micro-batches follow one another.
        state_bytes: Bytes of an element of optimizer states in 16-bit training; 2: also without float32 master weights.
        accumulates: How weight gradients are added to their sum: "fused": by the matrix product; "added": by a kernel
            after it; "copied": by a copy into the communication buffer.
        overlaps_data: True if gradient reductions over data-parallel ranks overlap the backward pass. ZeRO-3's
            parameter all-gathers overlap computation in every engine.
        overlaps_gathers: True if ZeRO-1's all-gathers of updated parameters overlap the first forward.
        copies_gathered: True if ZeRO-3's parameters are copied out of the buffer into which they were all-gathered;
            False if they are views of it.
        broadcasts: True if each rank broadcasts its updated parameters in turn, where others all-gather them.
        holds_in_pipelines: True if, under a pipeline, ZeRO-2 and ZeRO-3 all-gather parameters and reduce gradients once
            a step, not once a micro-batch.
        cuts: How the engine cuts a model into pipeline stages: "balanced" in FLOPs; "even": equal numbers of layers,
            regardless of embedding and head; "past shares": each ends where its share of the weights is passed.
        bucket_bytes: Largest message of gradient reductions and of ZeRO-1's all-gathers; None: one message per layer.
        bucket_rank_bytes: The same for each data-parallel rank, where this makes messages larger.
        host_seconds: Seconds in which the CPU launches one operation: a lower bound on the time of a micro-batch.
        dispatches_by_node: True if a token is sent once to each node (with a single node, to each rank) that holds
            chosen experts; False if once to each expert.
        overlap_processors: Fraction of a GPU's multiprocessors that dispatch and combine of tokens use while they
            overlap the computation of another micro-batch; None: they do not overlap.
        eight_bit_activations: True if fp8 training dispatches tokens to experts, and saves activations, in 8 bits.
        overlaps_tensor: Overlap of tp collectives. "weights": reductions of input gradients overlap the weight
            gradients of the same layer; "products": in addition, all collectives overlap, in slices, the matrix
            products before or after them; None: none.
        user_programs: True if most of its published runs are of users who timed a program as they had it, not of
            authors who tuned a recipe; their times differ more from predictions (bounds.py).
        axes, schedules, zero: Axes of the layout (in addition to data parallelism), pipeline schedules and ZeRO stages
            that the search tries.
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
    gathers_logits: bool = False
    compiles_loss: bool = True
    wide_parameters: bool = False
    gradient_bytes: int = 4
    held_gradient_bytes: int | None = None
    saves: Literal["megatron", "eager", "eight_bit"] = "megatron"
    holds_gradients: bool = False
    state_bytes: int = 4
    accumulates: Literal["fused", "added", "copied"] = "added"
    overlaps_data: bool = True
    overlaps_gathers: bool = False
    copies_gathered: bool = False
    broadcasts: bool = False
    holds_in_pipelines: bool = False
    cuts: Literal["balanced", "even", "past shares"] = "balanced"
    bucket_bytes: float | None = None
    bucket_rank_bytes: float = 0.0
    host_seconds: float = 35e-6
    dispatches_by_node: bool = False
    overlap_processors: float | None = None
    eight_bit_activations: bool = False
    overlaps_tensor: Literal["weights", "products"] | None = None
    user_programs: bool = False
    axes: tuple[str, ...] = ("tp", "cp", "pp", "ep")
    schedules: tuple[str, ...] = ("1f1b", "interleaved")
    zero: tuple[int, ...] = (0, 1)

    def stages(self, config: ModelConfig, count: int, sequence: int) -> tuple[Stage, ...]:
        """Cut a model into `count` pipeline stages as the engine does, and return the stages. sequence: tokens of a
        sequence, on which the FLOPs of layers depend."""
        if self.cuts == "balanced":
            return cut_into_stages(config, count, sequence)
        return cut_into_even_stages(config, count) if self.cuts == "even" else cut_past_shares(config, count)

    def communicated_zero_stage(self, zero: int, ranks: int) -> int:
        """Return the ZeRO stage by which the communication of a step is predicted. It is the layout's stage `zero`,
        with one exception: 1 in place of 2 and 3 if there is a pipeline and the engine then gathers parameters and
        reduces gradients only once a step (`holds_in_pipelines`). ranks: number of pipeline ranks."""
        return 1 if zero >= 2 and ranks > 1 and self.holds_in_pipelines else zero

    def compiled(self) -> Engine:
        """Return a copy of this engine for blocks compiled by torch.compile."""
        # bf16 logits are read for the maxima, for the sums, and read and written for the gradient; a copy.
        loss: dict[str, Any] = {"loss_bytes": min(self.loss_bytes, 12.0), "loss_holds": min(self.loss_holds, 8.0)}
        found = replace(self.recomputed_as_whole(), fusion="compiled")
        return replace(found, **loss) if self.compiles_loss else found

    def recomputed_as_whole(self) -> Engine:
        """Return this engine for compiled blocks, all of whose forward `meshwright` recomputes under `ac:full`."""
        return replace(self, stops_early=False) if self.name == "meshwright" else self

    def overlapped(self, setting: str, device: str, graphs: bool = False) -> Engine:
        """Return this engine as a run of the engine `meshwright` has it: tensor-parallel products overlap with their
        collectives if `setting` says so; `graphs`, on any device, allows `tp` and data parallelism, which does not
        overlap with a CUDA graph that the host launches at once. setting: `train.tensor_overlap`; device: "cpu" or
        "cuda"; graphs: `train.cuda_graphs`. Other engines are returned as they are."""
        overlaps = setting == "chunks" or (setting == "auto" and device == "cuda")
        found = replace(self, overlaps_tensor="products") if overlaps else self
        found = replace(found, axes=("tp",), zero=(0, 1)) if graphs else found
        found = replace(found, overlaps_data=False, host_seconds=0.0) if graphs and device == "cuda" else found
        return found if self.name == "meshwright" else self


ENGINES: dict[str, Engine] = {}
for _name, _table in read_packaged_toml("planner/cost/engines.toml").items():
    _fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in _table.items()}
    _base = ENGINES[_fields.pop("like")] if "like" in _fields else Engine(_name, "")
    ENGINES[_name] = replace(_base, name=_name, **_fields)


def choose_run_engine(tensor_overlap: str, device: str, compile: bool, graphs: bool = False) -> Engine:
    """Return the engine whose kernels and buffers a run has. tensor_overlap: `train.tensor_overlap`; device: "cpu" or
    "cuda"; compile: `train.compile`; graphs: `train.cuda_graphs`."""
    found = ENGINES["meshwright"].overlapped(tensor_overlap, device, graphs)
    return found.recomputed_as_whole() if compile else found


def engine(name: str | Engine, *, compile: bool = False) -> Engine:
    """Return the training engine called `name`, such as "megatron"; an `Engine` as `name` is not looked up. compile:
    True to return its variant for blocks compiled by torch.compile. Raises `UserError` for an unknown name; the text
    suggests the most similar one."""
    found = name if isinstance(name, Engine) else ENGINES.get(str(name))
    if found is None:
        raise UserError(unknown("engine", str(name), ENGINES))
    return found.compiled() if compile else found
