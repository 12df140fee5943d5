"""One layer of multi-head latent attention against transformers' layer of DeepSeek-V3: same weights, same tokens,
forward and backward, in one process, in turns.

    python bench/latent_attention.py [--turns 40] [--sequence 512]

Head sizes and proportions are those of DeepSeek-V3, with a sixteenth of its heads and a fourteenth of its width.
transformers attends by `eager` (all scores in memory) and by PyTorch's `sdpa`, its default. Before timing, results and
gradients are compared. Writes bench/results/latent_attention.json: the median of the paired ratios to the faster of
them, and to each.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

sys.path.insert(0, str(Path(__file__).parent))
from common import race_layers, write_result
from experts import step_of
from meshwright.model.axis_operations import SINGLE_DEVICE
from meshwright.model.latent_attention import LatentAttention
from meshwright.model.rope import RotaryTable
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_json import config_to_huggingface
from meshwright.spec.presets import preset

IMPLEMENTATIONS = ("eager", "sdpa")


class Ours(torch.nn.Module):
    """Our layer as a function of the hidden states alone."""

    def __init__(self, config: ModelConfig, sequence: int) -> None:
        super().__init__()
        self.layer = LatentAttention(config, SINGLE_DEVICE)
        rotation = config.layer_rotation(0)
        assert rotation is not None
        table = RotaryTable(rotation, torch.float32)
        self.turn = table.look_up(None, 0, sequence, torch.device("cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, self.turn, None)


class Theirs(torch.nn.Module):
    """transformers' layer, with our weights, as a function of the hidden states alone."""

    def __init__(self, config: ModelConfig, ours: Ours, implementation: str, sequence: int) -> None:
        super().__init__()
        theirs = AutoConfig.for_model(**dict(config_to_huggingface(config)))
        theirs._attn_implementation = implementation
        self.layer, latent = DeepseekV3Attention(theirs, 0), config.latent
        assert latent is not None and latent.query_rank is not None
        query, keys = ours.layer.qkv.weight.split([latent.query_rank, latent.cached_dim])
        assert ours.layer.query_norm is not None and ours.layer.query_up is not None
        state = {
            "q_a_proj": query, "kv_a_proj_with_mqa": keys, "q_a_layernorm": ours.layer.query_norm.weight,
            "q_b_proj": ours.layer.query_up.weight, "kv_a_layernorm": ours.layer.latent_norm.weight,
            "kv_b_proj": ours.layer.latent_up.weight, "o_proj": ours.layer.output.weight,
        }  # fmt: skip
        self.layer.load_state_dict({f"{name}.weight": value.detach().clone() for name, value in state.items()})
        places = torch.arange(sequence)[None]
        self.turn = DeepseekV3RotaryEmbedding(theirs)(torch.zeros(1, sequence, config.hidden), places)
        hidden = torch.full((sequence, sequence), float("-inf")).triu(1)[None, None]
        self.mask = hidden if implementation == "eager" else None  # sdpa is causal without a mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, position_embeddings=self.turn, attention_mask=self.mask)[0]


def config_of() -> ModelConfig:
    config = preset("deepseek-v3")
    assert config.latent is not None
    latent = dataclasses.replace(config.latent, query_rank=192, rank=64)
    sizes = {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 8, "latent": latent}
    return dataclasses.replace(config, **sizes)


def race(rows: int, sequence: int, turns: int) -> dict[str, Any]:
    config, make = config_of(), torch.Generator().manual_seed(1)
    ours = Ours(config, sequence)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(std=0.05, generator=make).add_(parameter.dim() == 1)
    x = torch.randn(rows, sequence, config.hidden, generator=make).requires_grad_()
    d = torch.randn(x.shape, generator=make)
    steps = {"meshwright": step_of(ours, x, d)}
    for implementation in IMPLEMENTATIONS:
        steps[implementation] = step_of(Theirs(config, ours, implementation, sequence), x, d)
    return {
        "rows": rows,
        "sequence": sequence,
        "hidden": config.hidden,
        "heads": config.heads,
        **race_layers(steps, lambda: x.grad, turns),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--rows", type=int, default=2)
    options = parser.parse_args()
    found = race(options.rows, options.sequence, options.turns)
    write_result("latent_attention", {"threads": torch.get_num_threads(), "dtype": "float32", **found})


if __name__ == "__main__":
    main()
