"""The one check that a model can run on a layout, used by training, planning and verification."""

from __future__ import annotations

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.schedules.library import count_stages
from meshwright.spec.adapter_config import BLOCK
from meshwright.spec.config import ModelConfig
from meshwright.spec.disk_names import DISK_NAMES
from meshwright.spec.parameters import parameter_table
from meshwright.spec.stage_times import StageTimes


def refuse(
    layout: Layout,
    config: ModelConfig,
    batch: int,
    sequence: int | None = None,
    world_size: int | None = None,
    *,
    planning: bool = False,
) -> None:
    """Check that a model can run on a layout; raise ``UserError`` with the first reason why not, in one line.

    ``config``: configuration of the model; ``batch``: sequences per step over all ranks; ``sequence``: tokens in each
    sequence (None: not checked); ``world_size``: ranks available (None: not checked). ``planning``: True to check only
    that the layout is possible for the model, not that Meshwright can run the model on it.
    """
    if not planning:
        if config.planning_only:
            raise UserError(f"{config.family} can be planned but not run: {config.planning_only}")
        if config.encoder:
            raise UserError(
                f"{config.family} is an encoder, and a recipe needs a decoder to train, verify or serve. Train it as a "
                "user-defined module (examples/bert_classifier.py, docs/model.md)"
            )
        layout.check_implemented()
    reason = (
        _find_ranks_problem(layout, world_size)
        or _find_encoder_problem(layout, config)
        or _find_batch_problem(layout, batch)
        or _find_tensor_problem(layout, config)
        or _find_sequence_problem(layout, config, sequence, planning)
        or _find_context_problem(layout, config)
        or _find_pipeline_problem(layout, config, sequence, planning)
        or _find_expert_problem(layout, config)
        or _find_adapter_problem(layout, config)
    )
    if reason:
        raise UserError(f'layout "{layout}": {reason}')


def serving_layout(text: str, config: ModelConfig) -> Layout:
    """Parse a layout for serving, generation and evaluation, such as "tp2 pp2" (`text`); return it. The layout may have
    dp, tp, pp, and an ep that divides tp. Raises UserError for other axes, and for a layout that the model with
    configuration `config` cannot use.

    The result has tp without sequence parallelism, because the tokens of a step cannot be split over ranks. Experts are
    sharded within each of the dp model copies, because model copies exchange no tokens.
    """
    layout = Layout.parse(text) if text.strip() else Layout()
    reading = Layout(dp=layout.dp, tp=layout.tp, tensor_sequence_parallel=layout.tp == 1, pp=layout.pp, ep=layout.ep)
    if layout not in (reading, reading.with_(tensor_sequence_parallel=True)):
        raise UserError(f'layout "{layout}": serving runs on dpN, tpN, ppN and epN alone, as in "tp2 pp2 dp2"')
    if layout.tp % layout.ep:
        raise UserError(
            f'layout "{layout}": ep{layout.ep} does not divide tp{layout.tp}; a replica spreads its experts over its '
            "tp ranks, and replicas exchange no tokens"
        )
    refuse(layout, config, batch=layout.dp)  # as it was typed, not with the :nosp of `reading`
    return reading


def _find_ranks_problem(layout: Layout, world_size: int | None) -> str | None:
    """Return an error message if the layout does not use exactly `world_size` ranks, else None. world_size: number of
    available ranks; None: nothing is checked, and None is returned."""
    if world_size is None or world_size == layout.world_size:
        return None
    return f"it has {layout.world_size} ranks (dp x tp x cp x pp), but there are {world_size}"


def _find_batch_problem(layout: Layout, batch: int) -> str | None:
    """Return an error message if `batch`, in sequences per step, is not a multiple of dp x micro-batches of `layout`,
    else None."""
    share = layout.dp * layout.micro_batches
    if batch % share == 0:
        return None
    below, above = batch // share * share, (batch // share + 1) * share
    near = f"{below} or {above}" if below else f"{above}"
    return f"batch {batch} is not a multiple of dp x mb = {share}; {near} would be"


def _find_encoder_problem(layout: Layout, config: ModelConfig) -> str | None:
    """Return an error message if the model is an encoder and `layout` has tp, cp, pp or ep above 1, else None. config:
    configuration of the model."""
    if not config.encoder:
        return None
    cut = next(
        (f"{axis}{getattr(layout, axis)}" for axis in ("tp", "cp", "pp", "ep") if getattr(layout, axis) > 1), None
    )
    return cut and f"{config.family} is an encoder, which runs on dp with any zero; leave {cut} out"


def _find_tensor_problem(layout: Layout, config: ModelConfig) -> str | None:
    """Return an error message if tp of `layout` does not divide the model's heads or MLP widths, or leaves a rank
    without vocabulary entries, else None. config: configuration of the model."""
    tp = layout.tp
    for what, size in (
        (f"{config.heads} heads", config.heads),
        (
            f"intermediate size {config.intermediate}",
            config.intermediate if config.expert_layers < config.layers else 0,
        ),
        (f"expert width {config.expert_intermediate}", 0 if layout.expert_parallel else config.expert_intermediate),
        (f"shared expert's width {config.shared_intermediate}", config.shared_intermediate),
        (f"hidden size {config.hidden}", 0 if layout.expert_parallel else _count_expert_biases(config)),
    ):
        if size % tp:
            return f"tp{tp} does not divide the model's {what}{_format_divisor_hint(size, tp)}"
    if config.kv_heads % tp and tp % config.kv_heads:
        return (
            f"tp{tp} and the model's {config.kv_heads} key-value heads do not divide each other: one must be a "
            "multiple of the other"
        )
    if config.kv_heads % tp and config.family != "bloom" and "qkv" in DISK_NAMES[config.family]:
        return (
            f"tp{tp} is more than the model's {config.kv_heads} key-value heads, which family {config.family} has in "
            f"one matrix with the queries on disk; tp must divide them"
        )
    width = -(-config.vocabulary // tp)
    if width * (tp - 1) >= config.vocabulary:
        return (
            f"tp{tp} cuts the model's vocabulary of {config.vocabulary} into slices of {width}, of which the last rank "
            f"gets none; tp{-(-config.vocabulary // width)} would do"
        )
    return None


def _find_sequence_problem(layout: Layout, config: ModelConfig, sequence: int | None, planning: bool) -> str | None:
    """Return an error message if `sequence` (tokens; None: not checked) is longer than the model's positions, or cannot
    be divided evenly over cp and tp of `layout`; else None. config: configuration of the model. planning: True to
    accept sequences longer than the model's positions, unless positions are learned.
    """
    if sequence is None:
        return None
    # Learned positions end with their table; rotary positions can be extrapolated.
    if sequence > config.max_positions and (config.positions == "learned" or not planning):
        return f"sequence {sequence} is longer than the model's {config.max_positions} positions"
    pieces = 1
    why: list[str] = []
    if layout.cp > 1:
        # Ring attention gives each rank an early and a late chunk, for equal work.
        pieces, why = (2 * layout.cp, ["2 x cp"]) if layout.cp_method == "ring" else (layout.cp, ["cp"])
    if layout.tp > 1 and (layout.tensor_sequence_parallel or layout.expert_parallel):  # each routes its own tokens
        pieces, why = pieces * layout.tp, [*why, "tp"]
    if sequence % pieces:
        return f"sequence {sequence} is not a multiple of {' x '.join(why)} = {pieces}"
    return None


def _find_context_problem(layout: Layout, config: ModelConfig) -> str | None:
    """Return an error message if context parallelism of `layout` does not fit the model, else None. The model must not
    have multi-token prediction, and Ulysses's degree must divide the number of attention heads. config: configuration
    of the model."""
    if layout.cp > 1 and config.prediction_layers:
        return f"cp{layout.cp} splits sequences, whose next tokens multi-token prediction needs; leave cp out"
    if layout.cp == 1 or layout.cp_method != "ulysses":
        return None
    heads, kv_heads = config.heads // layout.tp, max(1, config.kv_heads // layout.tp)
    of_rank = " of a tensor-parallel rank" if layout.tp > 1 else ""
    if heads % layout.cp:
        return f"cp{layout.cp}:ulysses does not divide the {heads} heads{of_rank}; cp{layout.cp} need not divide them"
    if kv_heads % layout.cp and layout.cp % kv_heads:
        return (
            f"cp{layout.cp}:ulysses and the {kv_heads} key-value heads{of_rank} do not divide each other: one must be "
            f"a multiple of the other; cp{layout.cp} needs neither"
        )
    return None


def _find_pipeline_problem(layout: Layout, config: ModelConfig, sequence: int | None, planning: bool) -> str | None:
    """Return an error message if the pipeline of `layout` has more stages than the model has layers, else None.

    config: configuration of the model. planning: True to compute the number of stages from `layout` alone; False to
    check that its pipeline schedule exists. sequence: tokens of a sequence, used to generate the schedule `auto`; None:
    the model's maximum."""
    stages = layout.pp * layout.chunks
    if stages <= config.layers and not planning:  # in planning the schedule file may be on another machine
        stages = count_stages(layout, StageTimes.of(layout, config, sequence or config.max_positions))
    if stages <= config.layers:
        return None
    chunks = f" x {stages // layout.pp} chunks" if stages > layout.pp else ""
    return f"pp{layout.pp}{chunks} makes {stages} stages, but the model has {config.layers} layers: some would be empty"


def _find_expert_problem(layout: Layout, config: ModelConfig) -> str | None:
    """Return an error message if ep of `layout` does not divide the number of the model's experts, or if etp does not
    divide their width; else None. config: configuration of the model."""
    if not layout.expert_parallel:
        return None
    if not config.experts:
        return f"ep{layout.ep}:etp{layout.etp} needs a model with experts, and this one has none"
    if config.experts % layout.ep:
        hint = _format_divisor_hint(config.experts, layout.ep)
        return f"ep{layout.ep} does not divide the model's {config.experts} experts{hint}"
    if config.expert_intermediate % layout.etp:
        width = config.expert_intermediate
        return (
            f"etp{layout.etp} does not divide the model's expert width {width}{_format_divisor_hint(width, layout.etp)}"
        )
    if (size := _count_expert_biases(config)) % layout.etp:
        return f"etp{layout.etp} does not divide the model's hidden size {size}{_format_divisor_hint(size, layout.etp)}"
    return None


def _count_expert_biases(config: ModelConfig) -> int:
    """Return the number of elements of the bias of an expert's down projection; 0 if experts have no biases. The ranks
    that shard an expert's width also share this bias, one slice per rank, so their number must divide it. config:
    configuration of the model."""
    return config.hidden if config.experts and config.mlp_bias else 0


def _find_adapter_problem(layout: Layout, config: ModelConfig) -> str | None:
    """Return an error message if tp of `layout` would cut a block of quantized weights (which share a scale) in two,
    else None. config: configuration of the model."""
    if config.adapter is None or config.adapter.packed is None or layout.tp == 1:
        return None
    for entry in parameter_table(config).entries:
        if entry.packed and entry.split.get("tp") == 1 and entry.model_shape[1] % (layout.tp * BLOCK):
            width = entry.model_shape[1] // layout.tp
            return (
                f"tp{layout.tp} gives each rank {width} of the {entry.model_shape[1]} inputs of {entry.name}, which "
                f"cuts blocks of {BLOCK} elements; adapter.base {entry.packed} needs a smaller tp"
            )
    return None


def _format_divisor_hint(size: int, wanted: int) -> str:
    """Return the end of an error message: the nearest divisors of ``size`` (such as a number of heads) below and above
    ``wanted``, a parallel degree that does not divide it.
    """
    below = max(count for count in range(1, wanted) if size % count == 0)
    above = next((count for count in range(wanted + 1, size + 1) if size % count == 0), None)
    return f"; {below} or {above} would" if above else f"; {below} would"
