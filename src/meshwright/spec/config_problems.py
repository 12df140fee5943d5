"""Checks of the ModelConfig fields of mixtures of experts and rotary positions, and of all floating-point fields;
`config` is a ModelConfig, whose module imports this one."""

from __future__ import annotations

from typing import Any

from meshwright.spec.families import Experts

SMALLEST_NUMBER, LARGEST_NUMBER = 1e-18, 1e18
"""Smallest and largest value of a floating-point field other than 0; their squares are numbers of float32."""


def find_experts_problem(config: Any) -> str | None:
    """Return an error message for the first invalid or contradictory mixture-of-experts field of `config`, a
    ModelConfig; None if all are valid."""
    if config.experts_keys is None:
        given = [name for name in ("experts", "experts_per_token", "expert_intermediate") if getattr(config, name)]
        return f"family {config.family} has no experts: leave {given[0]} out" if given else None
    for name in ("experts", "experts_per_token", "expert_intermediate"):
        if getattr(config, name) < 1:
            return f"{name} must be at least 1 in family {config.family}, not {getattr(config, name)}"
    if config.experts_per_token > config.experts:
        return f"experts_per_token {config.experts_per_token} is more than the model's {config.experts} experts"
    if config.shared_intermediate < 0 or config.router_loss < 0:
        return "shared_intermediate and router_loss must be at least 0"
    if config.shared_gate and not config.shared_intermediate:
        return f"shared_intermediate must be at least 1 in family {config.family}"
    wrong = [layer for layer in config.dense_layers if not 0 <= layer < config.layers]
    if wrong or sorted(set(config.dense_layers)) != list(config.dense_layers):
        return f"dense_layers must be numbers of layers from 0 to {config.layers - 1}, each once and in order"
    if len(config.dense_layers) == config.layers:
        return "dense_layers leaves no layer to the experts"
    return _find_family_problem(config, config.experts_keys)


def _find_family_problem(config: Any, keys: Experts) -> str | None:
    """Return an error message if the mixture-of-experts fields of `config` cannot be written to this family's
    ``config.json``, because it has no keys for them; else None. keys: names of the family's keys for experts.
    """
    family = f"family {config.family}"
    if keys.width is None and config.intermediate != config.expert_intermediate:
        return f"{family} has one width: intermediate {config.intermediate} is expert_intermediate"
    if not keys.groups and (config.expert_groups, config.groups_per_token) != (1, 1):
        return f"{family} has no expert groups"
    if keys.shared == "" and config.shared_intermediate != config.expert_intermediate:
        return f"{family} has a shared expert as wide as the others: shared_intermediate is expert_intermediate"
    if not keys.shared_copies:
        return None
    if config.dense_layers != tuple(range(len(config.dense_layers))):
        return f"{family} has its dense_layers at the beginning"
    if not config.shared_intermediate or config.shared_intermediate % config.expert_intermediate:
        return (
            f"{family} has shared experts as wide as the others: shared_intermediate must be a multiple "
            f"of expert_intermediate {config.expert_intermediate}, not {config.shared_intermediate}"
        )
    return _find_groups_problem(config)


def _find_groups_problem(config: Any) -> str | None:
    """Return an error message if the fields of expert groups (``expert_groups``, ``groups_per_token``) of `config`
    contradict its number of experts; None if they are consistent."""
    groups, used = config.expert_groups, config.groups_per_token
    if not 1 <= used <= groups or config.experts % groups:
        return f"experts {config.experts} must be a multiple of expert_groups {groups}, of which a token uses {used}"
    size = config.experts // groups
    if config.router == "sigmoid" and size < 2:  # a group is chosen by its two highest scores
        return f"family {config.family} has at least 2 experts" + (" in a group" if groups > 1 else "")
    if config.experts_per_token > used * size:
        return f"experts_per_token {config.experts_per_token} is more than the {used * size} experts of {used} groups"
    return None


def find_number_problem(config: Any) -> str | None:
    """Return an error message for the first floating-point field of `config` or of its RoPE scaling that is so small or
    large that float32 arithmetic with its square ends in 0 or infinity; None if there is none."""
    for prefix, record in (("", config), ("rope_scaling: ", config.rope_scaling)):
        for name in () if record is None else record.__slots__:
            field = getattr(record, name)
            for value in field if isinstance(field, tuple) else (field,):
                if isinstance(value, float) and value and not SMALLEST_NUMBER <= abs(value) <= LARGEST_NUMBER:
                    return f"{prefix}{name} {value:g} must be from {SMALLEST_NUMBER:g} to {LARGEST_NUMBER:g}"
    return None


def find_rotation_problem(config: Any) -> str | None:
    """Return an error message for the first invalid field of rotary positions in `config`; None if all are valid."""
    if config.positions != "rope":
        return None
    if config.latent is None and config.head_dim % 2:
        return f"head_dim {config.head_dim} must be even: rotary positions rotate pairs of features"
    if not 0 < config.rotary_fraction <= 1 or config.rotary_dim < 2:
        return (
            f"rotary_fraction {config.rotary_fraction:g} rotates {config.head_dim * config.rotary_fraction:g} features "
            f"of head_dim {config.head_dim}; it must rotate 1 to {config.head_dim}"
        )
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "longrope":
        for name in ("short_factors", "long_factors"):
            if len(getattr(scaling, name)) != config.rotary_dim // 2:
                return (
                    f"rope_scaling has {len(getattr(scaling, name))} {name}, "
                    f"one for each of {config.rotary_dim // 2} rotated pairs is needed"
                )
    wrong = [layer for layer in config.unrotated_layers if not 0 <= layer < config.layers]
    if wrong or sorted(set(config.unrotated_layers)) != list(config.unrotated_layers):
        return f"unrotated_layers must be numbers of layers from 0 to {config.layers - 1}, each once and in order"
    return None
