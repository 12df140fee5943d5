"""Rotary positions (RoPE, Su et al. 2021, arXiv:2104.09864) with the published scaling methods. The first R <= D
features of a head, an even number, are rotated in pairs: feature i with i + R/2, the half-rotation order of Hugging
Face, or neighbours.

Shapes: B sequences, S tokens of a sequence, D head size, R rotated features of it, P positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.model.documents import ONE_DOCUMENT, Documents
from meshwright.model.precision import at_least_float32
from meshwright.spec.rope_scaling import RopeScaling, Rotation, Temperature


def compute_inverse_frequencies(rotation: Rotation, dtype: torch.dtype, length: int = 0) -> Tensor:
    """Return the rotary frequencies of a layer, [R/2] for R rotated features, in `dtype`: the angle per position of
    each pair of features, in radians.

    `rotation`: the layer's rotary settings; `length`: tokens of the longest sequence, by which LongRoPE chooses its
    factors. Operations are in the order of the transformers library, so that float32 tables agree to the last bit at
    any position.
    """
    exponents = torch.arange(0, rotation.size, 2, dtype=dtype) / rotation.size
    wave = rotation.theta**exponents
    scaling = rotation.scaling
    if scaling is None:
        return 1.0 / wave
    if scaling.kind == "linear":
        return 1.0 / wave / scaling.factor
    if scaling.kind == "llama3":
        return _scale_llama3(1.0 / wave, scaling)
    if scaling.kind == "longrope":
        return 1.0 / (torch.tensor(_choose_longrope_factors(scaling, length), dtype=dtype) * wave)
    assert scaling.kind == "yarn", scaling.kind
    return _scale_yarn(wave, scaling, rotation)


def _choose_longrope_factors(scaling: RopeScaling, length: int) -> tuple[float, ...]:
    """Return LongRoPE's divisors of the rotary frequencies for sequences of up to `length` tokens (Ding et al. 2024,
    arXiv:2402.13753): the short or long factors of `scaling`; empty for other scaling methods."""
    return scaling.long_factors if length > (scaling.original_max_positions or 0) else scaling.short_factors


def _scale_llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return the rotary `frequencies` [R/2] scaled as in Llama 3.1: low frequencies (long wavelengths) are divided by
    the scaling factor, high frequencies stay unchanged, with a ramp between. `scaling`: factor and limits."""
    assert scaling.original_max_positions and scaling.low_frequency_factor and scaling.high_frequency_factor
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    between = max(high - low, 1e-30)  # they are equal in Llama 4: no ramp
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_positions / wavelengths
    kept_share = ((turns - low) / between).clamp(0, 1)
    return (1 - kept_share) * frequencies / scaling.factor + kept_share * frequencies


def _scale_yarn(wave: Tensor, scaling: RopeScaling, rotation: Rotation) -> Tensor:
    """Return the rotary frequencies [R/2] of YaRN (arXiv:2309.00071, section 3.2): high frequencies unchanged, low
    frequencies divided by the scaling factor, with a ramp between.

    `wave`: inverse of the unscaled frequencies, base ** (2i / R) for pair i of R rotated features; `scaling`,
    `rotation`: settings of YaRN and of the layer's rotary embedding.
    """
    assert scaling.original_max_positions is not None
    positions = scaling.original_max_positions

    def find_pair_index(times: float) -> float:
        """Return the (fractional) index of the dimension pair that rotates `times` times within the original context
        length."""
        turns = positions / (times * 2 * math.pi)
        return rotation.size * math.log(turns) / (2 * math.log(rotation.theta))

    low, high = (find_pair_index(beta) for beta in (scaling.beta_fast or 32.0, scaling.beta_slow or 1.0))
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotation.size - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(len(wave), dtype=wave.dtype) - low) / (high - low)).clamp(0, 1)
    kept_share = 1 - ramp
    return 1.0 / (scaling.factor * wave) * (1 - kept_share) + 1.0 / wave * kept_share


class RotaryTable:
    """Table of the cosines and sines of rotary angles by position, shared by all layers with the rotary settings
    `rotation`. It grows when larger positions are requested, and is not saved with the model.

    `dtype`: dtype of the model. `length`: tokens of the longest sequence, by which LongRoPE chooses its factors; None:
    LongRoPE chooses them for each document by the document's length.

    Angles are computed in float32 (float64 for a float64 model): bfloat16 cannot tell positions beyond 256 apart."""

    def __init__(self, rotation: Rotation, dtype: torch.dtype, length: int | None = None) -> None:
        self._dtype = at_least_float32(dtype)
        self._rotation = rotation
        self._length = length
        self._scale = rotation.attention_scale
        self._tables: dict[tuple[float, ...], tuple[Tensor, Tensor]] = {}

    def get_table(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (cosines, sines), [P, R/2] each, on `device`, for the positions 0 to P - 1, where P is at least
        `length`."""
        longest = length if self._length is None else self._length
        scaling = self._rotation.scaling
        factors = () if scaling is None else _choose_longrope_factors(scaling, longest)
        table = self._tables.get(factors)
        if table is None or table[0].shape[0] < length or table[0].device != device:
            positions = torch.arange(1 << (length - 1).bit_length(), dtype=self._dtype)
            angles = torch.outer(positions, compute_inverse_frequencies(self._rotation, self._dtype, longest))
            table = (angles.cos() * self._scale).to(device), (angles.sin() * self._scale).to(device)
            self._tables[factors] = table
        return table

    def look_up(
        self, positions_BS: Tensor | None, start: int, stop: int, device: torch.device,
        documents: Documents = ONE_DOCUMENT,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return (cosine, sine) of the rotary angles at the positions `positions_BS`, [B or 1, 1, S, R/2] each for R
        rotated features, on `device`. All positions must be less than `stop`. If `positions_BS` is None, the positions
        are start ... stop - 1 in every sequence; otherwise `start` is ignored.

        `documents`: document boundaries, by which LongRoPE chooses its factors.
        """
        cosine, sine = self.get_table(stop, device)
        if positions_BS is None:
            return cosine[None, None, start:stop], sine[None, None, start:stop]
        cosine, sine = (table[positions_BS][:, None] for table in (cosine, sine))
        scaling = self._rotation.scaling
        by_document = self._length is None and scaling is not None and scaling.kind == "longrope"
        trained = scaling.original_max_positions if scaling is not None and by_document else None
        if trained is None or (lengths_BS := documents.lengths_BS()) is None:
            return cosine, sine
        # Documents that are packed into one sequence each get the factors that they get alone, on any layout.
        is_short = (lengths_BS <= trained)[:, None, :, None]
        short = (table[positions_BS.clamp(max=trained - 1)][:, None] for table in self.get_table(trained, device))
        cosine, sine = (torch.where(is_short, *both) for both in zip(short, (cosine, sine), strict=True))
        return cosine, sine


class TemperatureTable:
    """Table of the factors by which a layer's queries are multiplied at each position (attention temperatures of Llama
    4), in `dtype` or float32. It has the interface of `RotaryTable`. `temperature`: settings of the factors."""

    def __init__(self, temperature: Temperature, dtype: torch.dtype) -> None:
        self._temperature = temperature
        self._dtype = at_least_float32(dtype)

    def look_up(
        self, positions_BS: Tensor | None, start: int, stop: int, device: torch.device,
        documents: Documents = ONE_DOCUMENT,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Return the factors of the queries [B or 1, 1, S, 1] at the positions `positions_BS` (None: start ... stop -
        1), and None in place of a sine. `device`: device of the factors; `documents`: ignored."""
        if positions_BS is None:
            positions_BS = torch.arange(start, stop, device=device)[None]
        steps_BS = (positions_BS + 1) // self._temperature.floor
        factors_BS = steps_BS.to(self._dtype).log1p() * self._temperature.scale + 1
        return factors_BS[:, None, :, None], None


def make_table(kind: Rotation | Temperature, dtype: torch.dtype, length: int | None) -> RotaryTable | TemperatureTable:
    """Build the table of position-dependent factors that a layer applies to its queries and keys: rotary cosines and
    sines (RoPE), or temperatures of the queries (Llama 4).

    `kind`: the layer's rotary or temperature settings, which select the table; `dtype`: dtype of the model; `length`:
    number of tokens of the longest sequence, by which LongRoPE chooses its factors; None: LongRoPE chooses them for
    each document by the document's length."""
    return TemperatureTable(kind, dtype) if isinstance(kind, Temperature) else RotaryTable(kind, dtype, length)


def pad_pairs(table: tuple[Tensor, Tensor], size: int) -> tuple[Tensor, Tensor]:
    """Pad a rotary table from R/2 to D/2 pairs of features. The added pairs have angle 0, which leaves their features
    unchanged. `table`: (cosines, sines), [P, R/2] each, for P positions and R rotated features; `size`: head size D.
    Return both as [P, D/2].
    """
    cosine, sine = table
    more = cosine.shape[0], size // 2 - cosine.shape[1]
    return torch.cat([cosine, cosine.new_ones(more)], dim=1), torch.cat([sine, sine.new_zeros(more)], dim=1)


def rotate(x_BNSD: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool = False) -> Tensor:
    """Return `x_BNSD` with the rotary embedding applied, in its shape and dtype: each pair (i, i + R/2) of the first R
    features is rotated by its angle at the token's position.

    `cosine`, `sine`: [B or 1, 1, S, R/2]. `interleaved`: True: the pairs are features (2i, 2i + 1) instead.

    The result is stored as [B, N, S, D] on a CPU, elsewhere as [B, S, N, D]: the orders that PyTorch's attention
    kernels read without a copy.
    """
    if x_BNSD.device.type == "cpu":
        return _rotate_first(x_BNSD, cosine, sine, interleaved)
    x_BSND, cosine, sine = (each.transpose(1, 2) for each in (x_BNSD, cosine, sine))
    return _rotate_first(x_BSND, cosine, sine, interleaved).transpose(1, 2)


def _rotate_first(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
    """Return `x` [..., D] with the pairs of its first R features rotated, in the dtype of `x`.

    `cosine`, `sine`: cosine and sine of the angles, broadcast against [..., R/2]; `interleaved`: True: the pairs are
    features (2i, 2i + 1); False: (i, i + R/2)."""
    size = 2 * cosine.shape[-1]
    if size < x.shape[-1]:
        rotated = _rotate_first(x[..., :size], cosine, sine, interleaved)
        return torch.cat([rotated, x[..., size:]], dim=-1)
    if not interleaved:
        return _rotate_halves(x, cosine, sine)
    halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return _rotate_halves(halves, cosine, sine).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def _rotate_halves(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return `x` [..., D] with each pair of dimensions (i, i + D/2) rotated by an angle, in the dtype of `x`. `cosine`,
    `sine`: cosine and sine of the angles, broadcast against [..., D/2]."""
    first, second = x.to(cosine.dtype).chunk(2, dim=-1)
    rotated = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return rotated.to(x.dtype)
