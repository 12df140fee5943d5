"""Checks of a recipe that need no data, made before data are prepared and before a process is started. Free of
torch."""

from __future__ import annotations

from pathlib import Path

from meshwright.data import PreparedData
from meshwright.data.tokenizers.tokenizer import FILES, find_smallest_vocabulary, find_tokenizer
from meshwright.errors import UserError
from meshwright.monitoring.trackers import check_trackers
from meshwright.recipe import Recipe
from meshwright.spec.adapter_json import check_initial_adapter
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_from_recipe import config_from_recipe
from meshwright.spec.config_json import config_from_path
from meshwright.spec.distillation import check_teacher, check_vocabularies, read_teacher_config
from meshwright.spec.parameters import parameter_table
from meshwright.spec.refuse import refuse


def check_recipe(recipe: Recipe) -> None:
    """Raise `UserError` with the first reason why the recipe's model cannot train with its layout, batch, sequence
    length and tokenizer.

    Called before data are prepared: for a tokenizer that is yet to be trained, the smallest possible vocabulary is
    assumed.
    """
    recipe.parsed_layout.check_implemented()
    if recipe.base_directory is not None:  # before its tokenizer is read, so that a damaged directory is reported
        config_from_path(recipe.base_directory)
    read_teacher_config(recipe)
    least = find_smallest_vocabulary(recipe.data.tokenizer)
    check_vocabulary(recipe, least)
    student = config_from_recipe(recipe.model, recipe.data.sequence, least, recipe.adapter)
    check_teacher(recipe, student, recipe.parsed_layout)
    check_cuda_graphs(recipe, student)
    check_profile_and_trackers(recipe)


def check_vocabulary(recipe: Recipe, tokens: int) -> None:
    """Raise `UserError` if the recipe's model with a vocabulary of `tokens` entries cannot be trained on its layout."""
    layout = recipe.parsed_layout
    config = config_from_recipe(recipe.model, recipe.data.sequence, tokens, recipe.adapter)
    refuse(layout, config, recipe.train.batch, recipe.data.sequence, layout.world_size)


def check_adapter_from(recipe: Recipe) -> None:
    """Raise `UserError` unless `adapter.from`, if set, names an adapter with the same settings as the recipe's adapter.
    Training starts from the values of the named adapter."""
    if recipe.adapter.from_path is not None:
        least = find_smallest_vocabulary(recipe.data.tokenizer)
        config = config_from_recipe(recipe.model, recipe.data.sequence, least, recipe.adapter)
        check_initial_adapter(recipe.adapter.from_path, config)


def check_teacher_tokenizer(recipe: Recipe, data: PreparedData) -> None:
    """Raise `UserError` if the teacher of a recipe with distillation does not fit the data or the model. The teacher's
    tokenizer must equal the tokenizer of the data, and the teacher's vocabulary size may differ from the model's only
    by padding. If the teacher's directory lacks tokenizer.json, only the sizes are compared, and they must be equal."""
    if recipe.distill.teacher is None:
        return
    student = config_from_recipe(recipe.model, recipe.data.sequence, data.vocabulary, recipe.adapter).vocabulary
    if not Path(recipe.distill.teacher, FILES[0]).is_file():
        check_vocabularies(recipe, student, None)
        return
    found = find_tokenizer(recipe.distill.teacher)
    assert found is not None, "a path"
    theirs, ours = found.load().tokenizer.get_vocab(), data.tokenizer.tokenizer.get_vocab()
    if theirs != ours:
        token = min((token for token, number in ours.items() if theirs.get(token) != number), default=min(theirs))
        raise UserError(
            f"{recipe.where('distill.teacher')}: distill.teacher has another tokenizer than the data: token "
            f"{token[:40]!r} is {theirs.get(token, 'unknown')} there and {ours.get(token, 'unknown')} here; set "
            f'data.tokenizer = "{recipe.distill.teacher}"'
        )
    check_vocabularies(recipe, student, data.vocabulary)


def check_memory(recipe: Recipe, machine_bytes: int) -> None:
    """Raise `UserError` if the ranks of the run, all on this machine's CPU, certainly need more than `machine_bytes` of
    memory together; no check for runs on GPUs.

    `machine_bytes` is compared with two lower bounds of the memory, which hold for every layout with the recipe's
    number of micro-batches: one fp32 copy of all parameters, gradients and optimizer states; and one 16-bit hidden
    state for each token of a micro-batch of all data-parallel ranks together.
    """
    if recipe.run.device == "cuda" or (recipe.run.device == "auto" and Path("/dev/nvidiactl").exists()):
        return
    vocabulary = find_smallest_vocabulary(recipe.data.tokenizer)
    config = config_from_recipe(recipe.model, recipe.data.sequence, vocabulary, recipe.adapter)
    table = parameter_table(config)
    numel, trained = table.numel, table.trained.numel
    states = {"adamw": 4, "momentum": 3, "sgd": 2}[recipe.train.planned_optimizer]  # parameter, gradient, its state
    held = 4 * states * trained + 2 * (numel - trained)  # frozen parameters in 16 bits at least
    tokens = recipe.train.batch // recipe.parsed_layout.micro_batches * recipe.data.sequence
    for what, needed in (
        (f"{numel:,} parameters with gradients and optimizer state", held),
        (f"the hidden states of the {tokens:,} tokens of a micro-batch", 2 * tokens * config.hidden),
    ):
        if needed > machine_bytes:
            raise UserError(
                f"{recipe.source_path or 'recipe'}: {what} take at least {needed / 2**30:,.0f} GiB, and this machine "
                f"has {machine_bytes / 2**30:,.1f} GiB; make the model or the micro-batch smaller (`meshwright plan`)"
            )


def check_cuda_graphs(recipe: Recipe, config: ModelConfig) -> None:
    """Raise `UserError` with the first reason why forward and backward of the recipe cannot be one CUDA graph, if
    `train.cuda_graphs` is set, on any device. A graph repeats the kernels of one step on other values: neither shapes
    nor numbers that the host reads may change from step to step. The graph contains the collective calls of `tp`; those
    of ZeRO-0 and 1 are made before and after it.

    config: architecture of the recipe's model."""
    layout = recipe.parsed_layout
    problem = None
    sizes = [config.hidden, config.expert_intermediate // layout.tp]
    if config.adapter and any(entry.expert is not None for entry in parameter_table(config).trained.entries):
        sizes.append(config.adapter.rank)
    scores = "a softcap" if config.attention_softcap else ""  # of which the host makes every mask
    fits_flash = layout.precision in ("bf16", "fp16") and config.head_dim % 8 == 0 and config.head_dim <= 256
    if config.attention_sinks and not fits_flash:
        scores = "sinks, in types and head sizes that flash attention lacks,"
    kind = scores or ("chunks" if config.window_chunks else "")
    made_by_host = (
        f"a replay of a CUDA graph makes no copies of the host's masks, which attention with {kind} needs for"
    )
    if layout.world_size > layout.dp * layout.tp:
        problem = "CUDA graphs are not supported under cp and pp; use only dp and tp"
    elif layout.zero > 1:
        problem = f"CUDA graphs are not supported under zero{layout.zero}; use zero1"
    elif recipe.objective != "next-token":
        problem = f'a CUDA graph is for objective "next-token"; "{recipe.objective}" has inputs of changing shapes'
    elif layout.expert_parallel:
        problem = "CUDA graphs are not supported under ep; use only dp and tp"
    elif config.experts and (layout.precision != "bf16" or any(size % 8 for size in sizes)):
        problem = (
            "the host reads how many tokens each expert gets, unless layers have sizes that are multiples of 8 and are "
            "in bf16; write bf16 in the layout"
        )
    elif scores and recipe.data.document_mask:
        problem = f"{made_by_host} packed documents; set data.document_mask=false"
    elif kind and (config.sliding_window or recipe.data.sequence) < recipe.data.sequence:
        problem = (
            f"{made_by_host} sliding windows; set data.sequence={config.sliding_window}, where no token is beyond the "
            "window"
        )
    if recipe.train.cuda_graphs and problem is not None:
        raise UserError(f"{recipe.where('train.cuda_graphs')}: train.cuda_graphs: {problem}")


def check_profile_and_trackers(recipe: Recipe) -> None:
    """Raise `UserError` if the recipe's `train.profile_ranks` has a rank that the layout does not have, or if an
    experiment tracker in its `track.to` cannot be created."""
    layout = recipe.parsed_layout
    if beyond := [rank for rank in recipe.train.profile_ranks if rank >= layout.world_size]:
        where = f"{recipe.where('train.profile_ranks')}: train.profile_ranks"
        raise UserError(f"{where}: there is no rank {beyond[0]}: the layout has ranks 0 to {layout.world_size - 1}")
    check_trackers(recipe)
