"""One layer of experts against transformers' implementation of the same block: same weights, same tokens, forward and
backward, in one process, in turns.

    python bench/experts.py [--turns 40] [--tokens 1024] [--only mixtral]

Mixtral's and Qwen2-MoE's blocks with the experts of the published models and widths that a CPU computes in a moment.
transformers computes experts in several ways; each takes part (`eager`: a loop over experts; `grouped_mm`: PyTorch's
grouped product, the default). Before timing, results and gradients are compared. Writes
bench/results/experts.json: the median of the paired ratios to the fastest of them, and to each.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

sys.path.insert(0, str(Path(__file__).parent))
from common import race_layers, write_result
from meshwright.model.axis_operations import SINGLE_DEVICE
from meshwright.model.experts import Mixture
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_json import config_to_huggingface
from meshwright.spec.presets import preset

SIZES = {
    "mixtral": ("mixtral-8x7b-v0.1", {"hidden": 512, "intermediate": 1024, "expert_intermediate": 1024}),
    "qwen2_moe": (
        "qwen1.5-moe-a2.7b",
        {"hidden": 512, "intermediate": 1408, "expert_intermediate": 352, "shared_intermediate": 1408},
    ),
}
BLOCKS = {"mixtral": MixtralSparseMoeBlock, "qwen2_moe": Qwen2MoeSparseMoeBlock}
IMPLEMENTATIONS = ("eager", "grouped_mm")


def config_of(family: str) -> ModelConfig:
    name, sizes = SIZES[family]
    return dataclasses.replace(preset(name), layers=1, heads=8, kv_heads=8, head_dim=64, **sizes)


def ours_of(config: ModelConfig) -> Mixture:
    mixture = Mixture(config, SINGLE_DEVICE)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.normal_(std=0.05, generator=generator)
    return mixture


def theirs_of(config: ModelConfig, ours: Mixture, implementation: str) -> torch.nn.Module:
    """Their block with our weights."""
    theirs_config = AutoConfig.for_model(**dict(config_to_huggingface(config)))
    theirs_config._experts_implementation = implementation
    block = BLOCKS[config.family](theirs_config)
    stacked = {"gate_up_proj": ours.experts.up.weight, "down_proj": ours.experts.down.weight}
    state = {f"experts.{name}": weight.view(config.experts, -1, weight.shape[1]) for name, weight in stacked.items()}
    state["gate.weight"] = ours.router.weight
    if ours.shared is not None and ours.shared_gate is not None:
        gate, up = ours.shared.up.weight.chunk(2)
        state |= {
            "shared_expert.gate_proj.weight": gate,
            "shared_expert.up_proj.weight": up,
            "shared_expert.down_proj.weight": ours.shared.down.weight,
            "shared_expert_gate.weight": ours.shared_gate.weight,
        }
    block.load_state_dict({name: value.detach().clone() for name, value in state.items()})
    return block


def step_of(block: Callable[[torch.Tensor], Any], x: torch.Tensor, d: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Forward and backward; gradients are dropped first, as an optimizer does."""

    def step() -> torch.Tensor:
        x.grad = None
        block.zero_grad(set_to_none=True)
        y = block(x)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(d)
        return y.detach()

    return step


def race(family: str, tokens: int, turns: int) -> dict[str, Any]:
    config = config_of(family)
    ours = ours_of(config)
    make = torch.Generator().manual_seed(2)
    x = torch.randn(4, tokens // 4, config.hidden, generator=make).requires_grad_()
    d = torch.randn(x.shape, generator=make)
    steps = {"meshwright": step_of(ours, x, d)}
    for implementation in IMPLEMENTATIONS:
        steps[implementation] = step_of(theirs_of(config, ours, implementation), x, d)
    return {
        "experts": config.experts,
        "experts_per_token": config.experts_per_token,
        "hidden": config.hidden,
        "expert_intermediate": config.expert_intermediate,
        "tokens": tokens,
        **race_layers(steps, lambda: x.grad, turns),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--only", choices=SIZES)
    options = parser.parse_args()
    families = [options.only] if options.only else list(SIZES)
    races = {family: race(family, options.tokens, options.turns) for family in families}
    write_result("experts", {"threads": torch.get_num_threads(), "dtype": "float32", "races": races})


if __name__ == "__main__":
    main()
