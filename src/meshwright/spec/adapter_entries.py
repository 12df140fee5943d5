"""Parameter entries of adapters: the matrices A and B (and DoRA's magnitude) of each targeted linear layer, with the
sharding that follows from the layer's own.

A column-parallel layer shards outputs: B is sharded like the weight, A is replicated. A row-parallel layer shards
inputs: A is sharded like the weight, B is replicated, and the ranks' products B A x are summed together with W x. The
replicated matrix has partial gradients over tp in both cases, since each rank sees its own rows of B or columns of A.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from meshwright.errors import UserError
from meshwright.names import unknown
from meshwright.spec.adapter_config import ALL_LINEAR, BLOCK, AdapterConfig
from meshwright.spec.parameter_entries import Initial, ParameterEntry

PEFT_PREFIX = "base_model.model."
"""Prefix of PEFT to the module names of the base model."""

ADAPTER_PARTS = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
"""Part of an adapter in the model -> end of its name on disk."""

_ADAPTABLE = tuple(
    f".{layer}.weight"
    for layer in (
        *("attention.qkv", "attention.query_up", "attention.latent_up", "attention.output"),
        *("mlp.up", "mlp.down", "mlp.shared.up", "mlp.shared.down", "mlp.experts.up", "mlp.experts.down"),
    )
)


def find_adaptable_entries(entries: Sequence[ParameterEntry]) -> dict[str, ParameterEntry]:
    """Return the linear layers that can have an adapter, {Hugging Face module name: parameter entry of its weight}.
    These are the layers of attention, dense MLPs and shared experts, and the layers of routed experts if checkpoints
    store each expert separately. entries: parameter entries of the model."""
    return {
        entry.name.removesuffix(".weight"): entry
        for entry in entries
        if entry.tensor.endswith(_ADAPTABLE) and not entry.stacked
    }


def matches(module: str, target: str) -> bool:
    """Return True if `target` selects the linear layer with the Hugging Face name `module`.

    target: as PEFT writes it: a full module name, its last parts ("q_proj"), a pattern with * ? or [], or "all-linear",
    which matches every name (`_selects` excludes routed experts).
    """
    if any(character in target for character in "*?["):
        return fnmatchcase(module, target)
    return target in (ALL_LINEAR, module) or module.endswith(f".{target}")


def _selects(target: str, module: str, entry: ParameterEntry) -> bool:
    """Return True if `target` selects the linear layer `module` whose weight is `entry`. "all-linear" selects no routed
    experts, whose adapters would be larger than all other adapters together."""
    return matches(module, target) and not (target == ALL_LINEAR and entry.expert is not None)


def target_modules(entries: Sequence[ParameterEntry], targets: Sequence[str]) -> dict[str, ParameterEntry]:
    """Return the linear layers that `targets` select, {module name: parameter entry of its weight}, in the order of
    `entries`. Raises `UserError` with the nearest names for a target that selects no layer, and if the routed experts
    of a layer have different adapted matrices."""
    known = find_adaptable_entries(entries)
    for target in targets:
        if not any(matches(module, target) for module in known):
            # Experts of one tensor are named after it, "experts.down_proj[0]".
            names = (entry.name.partition("[")[0] for entry in entries if len(entry.shape) == 2)
            inside = {name.removesuffix(".weight") for name in names}
            if any(matches(module, target) for module in inside):
                raise UserError(
                    f'adapter.targets: "{target}" is an embedding, an output head, a router or a routed expert that is '
                    "stored with others in one tensor, which take no adapter; linear layers of attention, dense MLPs, "
                    "shared experts and experts of separate tensors do"
                )
            last = dict.fromkeys(module.rpartition(".")[2] for module in known)
            raise UserError(f"adapter.targets: {unknown('linear layer', target, (*last, ALL_LINEAR))}")
    found = {m: entry for m, entry in known.items() if any(_selects(target, m, entry) for target in targets)}
    _check_experts(known, found)
    return found


def _check_experts(known: Mapping[str, ParameterEntry], found: Mapping[str, ParameterEntry]) -> None:
    """Raise `UserError` unless all routed experts of a layer have the same adapted matrices. known: {module name:
    parameter entry of its weight} for all linear layers; found: such a dict for the linear layers that get an adapter.
    """
    adapted = {(entry.tensor, module.rpartition(".")[2]) for module, entry in found.items() if entry.expert}
    for module, entry in known.items() if adapted else ():
        if entry.expert and module not in found and (entry.tensor, module.rpartition(".")[2]) in adapted:
            raise UserError(
                f"adapter.targets: {module} is not selected, but other experts of its layer are; an adapter is of all "
                "experts of a layer"
            )


def name_adapter_tensor(weight: str, part: str) -> str:
    """Return the name of one parameter (A, B or DoRA's magnitude) of a linear layer's adapter. weight: name of the
    layer's weight, such as "layers.0.attention.qkv.weight"; part: "a", "b" or "magnitude"."""
    return f"{weight.removesuffix('.weight')}.adapter.{part}"


def add_adapter_entries(entries: Sequence[ParameterEntry], adapter: AdapterConfig) -> list[ParameterEntry]:
    """Return the parameter entries of a base model, frozen, followed by the parameter entries of `adapter`. Raises
    `UserError` if a target matches no linear layer, or the rank is above a layer's smaller width.
    """
    linear = find_adaptable_entries(entries).values() if adapter.packed else ()
    quantized = {entry.name for entry in linear if entry.expert is None}
    found = [
        replace(entry, trainable=False, packed=adapter.packed if entry.name in quantized else None) for entry in entries
    ]
    if adapter.random_constants:
        spread = {"ones": Initial("normal", 1.0), "zeros": Initial("normal", 0.05)}
        found = [replace(entry, initial=spread.get(entry.initial.kind, entry.initial)) for entry in found]
    for entry in found:
        if entry.packed and entry.model_shape[1] % BLOCK:
            raise UserError(
                f'adapter.base "{entry.packed}" packs blocks of {BLOCK} elements of a row, and {entry.name} '
                f'has rows of {entry.model_shape[1]}; use base = "bf16"'
            )
    for module, entry in target_modules(entries, adapter.targets).items():
        outputs, inputs = entry.model_shape
        if adapter.rank > min(outputs, inputs):
            raise UserError(
                f"adapter.rank {adapter.rank} is above the width of {module}, a matrix of {outputs} x {inputs}; "
                f"at most {min(outputs, inputs)}"
            )
        found += _make_adapter_entries(module, entry, adapter)
    filled: dict[str, int] = {}  # model parameter -> its rows so far
    for number, entry in enumerate(found):
        if entry.trainable:
            offset = filled.get(entry.tensor, 0)
            found[number] = replace(entry, offset=offset)
            filled[entry.tensor] = offset + entry.model_shape[0]
    return found


def _make_adapter_entries(module: str, weight: ParameterEntry, adapter: AdapterConfig) -> list[ParameterEntry]:
    """Build the parameter entries (A, B and DoRA's magnitude) of the adapter of one linear layer. module: its Hugging
    Face name; weight: parameter entry of its weight."""
    (outputs, inputs), rank = weight.model_shape, adapter.rank
    column = weight.split.get("tp") == 0
    replicated = {"split": {}, "blocks": (), "granularity": 1, "remainder": "refuse", "partial": "heads"}

    def make(part: str, shape: tuple[int, ...], sharded: bool, initial: Initial) -> ParameterEntry:
        """Build the parameter entry of one adapter tensor. part: key in `ADAPTER_PARTS`; shape: unsharded shape;
        sharded: True if tp shards it as it shards the weight; initial: initial values."""
        same = replace(
            weight,
            name=f"{PEFT_PREFIX}{module}.{ADAPTER_PARTS[part]}",
            shape=shape,
            transposed=False,
            tensor=name_adapter_tensor(weight.tensor, part),
            initial=initial,
            decay=len(shape) > 1,
            trainable=True,
        )
        return same if sharded else replace(same, **replicated)  # type: ignore[arg-type]

    # Standard deviation of PEFT's default, a uniform distribution of Kaiming with gain sqrt(1/3).
    first = Initial("normal", 1 / math.sqrt(3 * inputs))
    second = Initial("normal", 0.05) if adapter.random_constants else Initial("zeros")
    made = [
        make("a", (rank, inputs), not column, first),
        make("b", (outputs, rank), column, second),
    ]
    if adapter.kind == "dora":
        made.append(make("magnitude", (outputs,), column, Initial("ones")))
    return made
