"""Tables of the position-dependent factors of queries and keys, as the kernels read them."""

from __future__ import annotations

import torch

from meshwright.model.rope import make_table, pad_pairs
from meshwright.spec.config import ModelConfig
from meshwright.spec.rope_scaling import Rotation, Temperature

PositionTables = dict[Rotation | Temperature, tuple[torch.Tensor, torch.Tensor]]


def make_position_tables(config: ModelConfig, layers: range, length: int, device: torch.device) -> PositionTables:
    """Return {settings: (cosines, sines) by position} for the rotary embeddings of `layers` (indices), float32 [length,
    pairs of features] each on `device`. If the settings are a temperature, the factors of the queries are in place of
    the cosines, and the sines are 0. Pairs: those of a head's features, unrotated pairs at the angle 0; with latent
    attention those of the rotary key."""
    found: PositionTables = {}
    for settings in dict.fromkeys(map(config.layer_positions, layers)):
        if settings is not None:
            cosine, sine = make_table(settings, torch.float32, None).look_up(None, 0, length, device)
            pair = cosine[0, 0], torch.zeros_like(cosine[0, 0]) if sine is None else sine[0, 0]
            cosine, sine = (each.expand(-1, config.rotary_dim // 2).clone() for each in pair)
            found[settings] = (cosine, sine) if config.latent else pad_pairs((cosine, sine), config.head_dim)
    return found
