"""The one check whether a model can run on a layout. Training, planning and verifying all ask here."""

from __future__ import annotations

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.spec.config import ModelConfig
from meshwright.spec.stage_times import program_for


def refuse(
    layout: Layout,
    config: ModelConfig,
    batch: int,
    sequence: int | None = None,
    world_size: int | None = None,
    *,
    planning: bool = False,
) -> None:
    """``UserError`` with the first reason, in one line, why this model cannot run on this layout.

    ``batch``: sequences a step over all ranks; ``sequence``: tokens in each; ``world_size``: ranks that are there.
    ``planning`` asks only whether the combination makes sense, not whether this version can run it.
    """
    if not planning:
        if config.planning_only:
            raise UserError(f"{config.family} can be planned but not run: {config.planning_only}")
        if config.encoder:
            raise UserError(
                f"{config.family} is an encoder, and what trains, verifies and serves from a recipe predicts the next "
                f"token; train it as a module of its own (examples/bert_classifier.py, docs/model.md)"
            )
        layout.refuse_unbuilt()
    reason = (
        _ranks(layout, world_size)
        or _encoder(layout, config)
        or _batch(layout, batch)
        or _tensor(layout, config)
        or _sequence(layout, config, sequence, planning)
        or _context(layout, config)
        or _pipeline(layout, config, sequence, planning)
        or _expert(layout, config)
    )
    if reason:
        raise UserError(f'layout "{layout}": {reason}')


def _ranks(layout: Layout, world_size: int | None) -> str | None:
    if world_size is None or world_size == layout.world_size:
        return None
    return f"it has {layout.world_size} ranks (dp x tp x cp x pp), but {world_size} are there"


def _batch(layout: Layout, batch: int) -> str | None:
    share = layout.dp * layout.micro_batches
    if batch % share == 0:
        return None
    below, above = batch // share * share, (batch // share + 1) * share
    near = f"{below} or {above}" if below else f"{above}"
    return f"batch {batch} is not a multiple of dp x mb = {share}; {near} would be"


def _encoder(layout: Layout, config: ModelConfig) -> str | None:
    if not config.encoder:
        return None
    cut = next(
        (f"{axis}{getattr(layout, axis)}" for axis in ("tp", "cp", "pp", "ep") if getattr(layout, axis) > 1), None
    )
    return cut and f"{config.family} is an encoder, which runs on dp with any zero; leave {cut} out"


def _tensor(layout: Layout, config: ModelConfig) -> str | None:
    tp = layout.tp
    for what, size in (
        (f"{config.heads} heads", config.heads),
        (
            f"intermediate size {config.intermediate}",
            config.intermediate if config.expert_layers < config.layers else 0,
        ),
        (
            f"expert width {config.expert_intermediate}",
            0 if layout.expert_parallel else config.expert_intermediate,
        ),
        (f"shared expert's width {config.shared_intermediate}", config.shared_intermediate),
    ):
        if size % tp:
            return f"tp{tp} does not divide the model's {what}{_fitting(size, tp)}"
    if config.kv_heads % tp and tp % config.kv_heads:
        return (
            f"tp{tp} and the model's {config.kv_heads} key-value heads do not divide each other: "
            "every rank needs whole heads, or every head whole ranks"
        )
    width = -(-config.vocabulary // tp)
    if width * (tp - 1) >= config.vocabulary:
        return (
            f"tp{tp} cuts the model's vocabulary of {config.vocabulary} into slices of {width}, of which the last rank "
            f"gets none; tp{-(-config.vocabulary // width)} would do"
        )
    return None


def _sequence(layout: Layout, config: ModelConfig, sequence: int | None, planning: bool) -> str | None:
    if sequence is None:
        return None
    # A table of positions ends; rotary positions go on, though a model is not good at what it never saw.
    if sequence > config.max_positions and (config.positions == "learned" or not planning):
        return f"sequence {sequence} is longer than the model's {config.max_positions} positions"
    pieces = 1
    why: list[str] = []
    if layout.cp > 1:
        # The causal ring gives each rank an early and a late piece, so that all have equal work.
        pieces, why = (2 * layout.cp, ["2 x cp"]) if layout.cp_method == "ring" else (layout.cp, ["cp"])
    if layout.tp > 1 and (layout.tensor_sequence_parallel or layout.expert_parallel):  # each routes its own tokens
        pieces, why = pieces * layout.tp, [*why, "tp"]
    if sequence % pieces:
        return f"sequence {sequence} is not a multiple of {' x '.join(why)} = {pieces}"
    return None


def _context(layout: Layout, config: ModelConfig) -> str | None:
    if layout.cp == 1 or layout.cp_method != "ulysses":
        return None
    heads, kv_heads = config.heads // layout.tp, max(1, config.kv_heads // layout.tp)
    of_rank = " of a tensor-parallel rank" if layout.tp > 1 else ""
    if heads % layout.cp:
        return f"cp{layout.cp}:ulysses does not divide the {heads} heads{of_rank}; cp{layout.cp} needs no whole heads"
    if kv_heads % layout.cp and layout.cp % kv_heads:
        return (
            f"cp{layout.cp}:ulysses and the {kv_heads} key-value heads{of_rank} do not divide each other: every rank "
            f"needs whole heads, or every head whole ranks; cp{layout.cp} needs neither"
        )
    return None


def _pipeline(layout: Layout, config: ModelConfig, sequence: int | None, planning: bool) -> str | None:
    stages = layout.pp * layout.chunks
    if stages <= config.layers and not planning:  # what is only planned may be large, and its file elsewhere
        stages = program_for(layout, config, sequence or config.max_positions).stages
    if stages <= config.layers:
        return None
    chunks = f" x {stages // layout.pp} chunks" if stages > layout.pp else ""
    return f"pp{layout.pp}{chunks} makes {stages} stages, but the model has {config.layers} layers: some would be empty"


def _expert(layout: Layout, config: ModelConfig) -> str | None:
    if not layout.expert_parallel:
        return None
    if not config.experts:
        return f"ep{layout.ep}:etp{layout.etp} needs a model with experts, and this one has none"
    if config.experts % layout.ep:
        return (
            f"ep{layout.ep} does not divide the model's {config.experts} experts{_fitting(config.experts, layout.ep)}"
        )
    if config.expert_intermediate % layout.etp:
        width = config.expert_intermediate
        return f"etp{layout.etp} does not divide the model's expert width {width}{_fitting(width, layout.etp)}"
    return None


def _fitting(size: int, wanted: int) -> str:
    """The numbers next to ``wanted`` that divide ``size``, as a hint."""
    below = max(count for count in range(1, wanted) if size % count == 0)
    above = next((count for count in range(wanted + 1, size + 1) if size % count == 0), None)
    return f"; {below} or {above} would" if above else f"; {below} would"
