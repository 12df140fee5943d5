"""Rotary positions (RoPE, Su et al. 2021, arXiv:2104.09864) with the published scaling methods, in the half-rotation
order of Hugging Face: the pair of dimension i is dimension i + D/2.

Shapes: B sequences, S tokens of a sequence, D head size, P positions.
"""

from __future__ import annotations

import math

import torch

from meshwright.model.precision import at_least_float32
from meshwright.spec.config import ModelConfig
from meshwright.spec.rope_scaling import RopeScaling


def inverse_frequencies(config: ModelConfig, dtype: torch.dtype) -> torch.Tensor:
    """Return the rotary frequencies [D/2] of a model: the angle in radians per position of each dimension pair, in
    `dtype`.

    The order of operations is that of transformers, so that float32 tables agree to the last bit at any position."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=dtype) / config.head_dim
    wave = config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return 1.0 / wave
    if scaling.kind == "linear":
        return 1.0 / wave / scaling.factor
    if scaling.kind == "llama3":
        return _scale_llama3(1.0 / wave, scaling)
    assert scaling.kind == "yarn", scaling.kind
    return _yarn_frequencies(wave, scaling, config)


def _scale_llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Return the rotary `frequencies` [D/2] scaled as in Llama 3.1: low ones (long wavelengths) are divided by the
    scaling factor, high ones stay unchanged, with a ramp between. `scaling`: factor and limits."""
    assert scaling.original_max_positions and scaling.low_frequency_factor and scaling.high_frequency_factor
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_positions / wavelengths
    kept_share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept_share) * frequencies / scaling.factor + kept_share * frequencies


def _yarn_frequencies(wave: torch.Tensor, scaling: RopeScaling, config: ModelConfig) -> torch.Tensor:
    """Return the rotary frequencies [D/2] of YaRN (arXiv:2309.00071, section 3.2): high frequencies unchanged, low ones
    divided by the scaling factor, with a ramp between. `wave`: base ** (2i / D) of each dimension pair i, the inverse
    of its unscaled frequency."""
    assert scaling.original_max_positions is not None
    positions = scaling.original_max_positions

    def find_pair_index(times: float) -> float:
        """Return the (fractional) index of the dimension pair that rotates `times` times within the original context
        length."""
        turns = positions / (times * 2 * math.pi)
        return config.head_dim * math.log(turns) / (2 * math.log(config.rope_theta))

    low, high = find_pair_index(scaling.beta_fast or 32.0), find_pair_index(scaling.beta_slow or 1.0)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(len(wave), dtype=wave.dtype) - low) / (high - low)).clamp(0, 1)
    kept_share = 1 - ramp
    return 1.0 / (scaling.factor * wave) * (1 - kept_share) + 1.0 / wave * kept_share


class RotaryTable:
    """Table of the rotary cosines and sines of the model `config` by position, extended when larger positions are
    requested; not part of a model's state. `dtype`: dtype of the model.

    Angles are computed in float32 (float64 for a float64 model): bfloat16 cannot tell positions beyond 256 apart."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._dtype = at_least_float32(dtype)
        self._frequencies = inverse_frequencies(config, self._dtype)
        self._scale = config.rope_scaling.attention_scale if config.rope_scaling else 1.0
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None

    def up_to(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cosine, sine), [P, D/2] each (D: head size), on `device`, for positions 0 ... P - 1, where P is at
        least `length`."""
        if self._table is None or self._table[0].shape[0] < length or self._table[0].device != device:
            positions = torch.arange(1 << (length - 1).bit_length(), dtype=self._dtype)
            angles = torch.outer(positions, self._frequencies)
            self._table = ((angles.cos() * self._scale).to(device), (angles.sin() * self._scale).to(device))
        return self._table

    def look_up(
        self, positions_BS: torch.Tensor | None, start: int, stop: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine, [B or 1, 1, S, D/2] each, of the rotary angles at the positions `positions_BS`, on
        `device`. All positions must be less than `stop`. If `positions_BS` is None, they are start ... stop - 1 in
        every sequence; otherwise `start` is ignored."""
        cosine, sine = self.up_to(stop, device)
        if positions_BS is None:
            return cosine[None, None, start:stop], sine[None, None, start:stop]
        return cosine[positions_BS][:, None], sine[positions_BS][:, None]


def rotate(x_BNSD: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Return `x_BNSD` with the rotary embedding applied, in its shape and dtype: each pair of dimensions (i, i + D/2)
    is rotated by the angle of its position. `cosine`, `sine`: [B or 1, 1, S, D/2].

    The result is stored as [B, N, S, D] on a CPU, elsewhere as [B, S, N, D]: the orders that PyTorch's attention
    kernels read without a copy.
    """
    if x_BNSD.device.type == "cpu":
        return _rotate_halves(x_BNSD, cosine, sine)
    return _rotate_halves(*(each.transpose(1, 2) for each in (x_BNSD, cosine, sine))).transpose(1, 2)


def _rotate_halves(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Return `x` [..., D] with each pair of dimensions (i, i + D/2) rotated by an angle, in the dtype of `x`. `cosine`,
    `sine`: those of the angles, broadcast against [..., D/2]."""
    first, second = x.to(cosine.dtype).chunk(2, dim=-1)
    rotated = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return rotated.to(x.dtype)
