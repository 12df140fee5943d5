"""Checks of the ModelConfig fields of mixtures of experts; `config` is a ModelConfig, whose module
imports this one."""

from __future__ import annotations

from typing import Any

from meshwright.spec.families import Experts


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
