"""The operations of `meshwright.kernels.device_operations` in plain torch, with the kernels' sections and steps: the
reference of the Triton kernels, and their substitute on a CPU and on tensors without memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F

VERSION = "reference"
SECTION, STEP, BLOCK_TOKENS = 32, 8, 16


def add_norm(x_TH, delta_TH, weight_H, epsilon):
    if delta_TH is not None:
        x_TH.add_(delta_TH)
    return _normalise(x_TH, weight_H, epsilon)


def _normalise(x, weight, epsilon):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight).to(x.dtype)


def rotate_and_store(qkv, cache, tiles, rotation, norms, epsilon, queries_only=False):
    keys, values = cache[0], cache[1]
    kv_heads, size = keys.shape[1:]
    positions_T, slots_T = tiles.positions[: len(qkv)], tiles.slots[: len(qkv)]
    parts_TND = qkv.view(len(qkv), -1, size)
    q, k, v = parts_TND.split([parts_TND.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q, k = _normalise(q, norms[0], epsilon), _normalise(k, norms[1], epsilon)
    if rotation is not None:
        cosine, sine = (table[positions_T.long()][:, None] for table in rotation)
        q, k = _rotate(q, cosine, sine), k if queries_only else _rotate(k, cosine, sine)
    parts_TND[:, : q.shape[1]] = q
    keys[slots_T.long()] = k
    values[slots_T.long()] = v


def _rotate(x, cosine, sine):
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1).to(x.dtype)


def rotate_and_store_latent(parts, q_TND, wide_TNC, cache, tiles, tables, norm):
    rank, rotary = len(norm[0]), 2 * tables[0].shape[1]
    cosine_TE, sine_TE = (table[tiles.positions[: len(parts)].long()] for table in tables)
    latent_TR, key_TE = parts[:, :rank], parts[:, rank : rank + rotary]
    stored_TC = torch.cat([_normalise(latent_TR, *norm), _rotate(key_TE, cosine_TE, sine_TE)], dim=1)
    cache[tiles.slots[: len(parts)].long()] = stored_TC[:, None]
    wide_TNC[..., rank:] = _rotate(q_TND[..., q_TND.shape[2] - rotary :], cosine_TE[:, None], sine_TE[:, None])


def multiply_heads(x_TNX, weight_NYX, out_TNY):
    out_TNY[:] = torch.einsum("tnx,nyx->tny", x_TNX.float(), weight_NYX.float())


def attend(qkv, cache, tiles, settings, scratch, arrivals):
    """Every token over every position of the longest context, section by section and in each step by step."""
    assert scratch.dtype == torch.float32 and arrivals.dtype == torch.int32
    keys, values, tokens = cache[0], cache[-1], len(qkv)
    kv_heads, size = keys.shape[1:]
    heads = qkv.shape[1] // size - (0 if settings.key_only else 2 * kv_heads)
    first_I, count_I, owner_I = tiles.numbers
    places_IP = first_I[:, None] + torch.arange(tiles.tokens, device=qkv.device)
    real_IP = torch.arange(tiles.tokens, device=qkv.device) < count_I[:, None]
    owner_T = torch.zeros(tokens + 1, dtype=torch.int64, device=qkv.device)  # the last entry is for padding
    owner_T[torch.where(real_IP, places_IP, tokens).long()] = owner_I[:, None].long().expand_as(places_IP)
    position_T1, tables_TB = tiles.positions[:tokens, None], tiles.tables[owner_T[:tokens]]
    q_TKGD = qkv[:, : heads * size].view(tokens, kv_heads, -1, size).float()
    context = -(-tiles.context // STEP) * STEP
    total, sections = [], []
    for section in range(0, context, SECTION):
        highest = torch.full(q_TKGD.shape[:3], -torch.inf, device=qkv.device)
        weight, value = torch.zeros_like(highest), torch.zeros_like(q_TKGD)
        for start in range(section, min(context, section + SECTION), STEP):
            places_S = torch.arange(start, start + STEP, device=qkv.device)
            slots_TS = tables_TB[:, places_S // BLOCK_TOKENS].long() * BLOCK_TOKENS + places_S % BLOCK_TOKENS
            k_TSKD, v_TSKD = keys[slots_TS].float(), values[slots_TS]
            visible_TS = places_S <= position_T1
            if settings.window is not None:
                chunk_T1 = position_T1 // settings.window * settings.window
                visible_TS &= places_S >= (chunk_T1 if settings.chunks else position_T1 + 1 - settings.window)
            scores = torch.einsum("tkgd,tskd->tkgs", q_TKGD, k_TSKD) * settings.scale
            if settings.softcap:
                scores = settings.softcap * (scores / settings.softcap).tanh()
            scores = scores.masked_fill(visible_TS[:, None, None].logical_not(), -torch.inf)
            higher = torch.maximum(highest, scores.amax(-1))
            finite = higher.masked_fill(higher == -torch.inf, 0)
            weights, shrink = (scores - finite[..., None]).exp(), (highest - finite).exp()
            weight = weight * shrink + weights.sum(-1)
            weights = weights.to(v_TSKD.dtype).float()
            value = value * shrink[..., None] + torch.einsum("tkgs,tskd->tkgd", weights, v_TSKD.float())
            highest = higher
        total.append((highest, weight))
        sections.append(value)
    if settings.sinks is not None:  # one more section, of a key whose value is zero
        total.append((settings.sinks.float().view(kv_heads, -1).expand_as(weight), torch.ones_like(weight)))
        sections.append(torch.zeros_like(value))
    best = torch.stack([highest for highest, _ in total]).amax(0)
    scales = [(highest - best).exp() for highest, _ in total]
    weight = sum(scale * weight for scale, (_, weight) in zip(scales, total, strict=True))
    value = sum(scale[..., None] * each for scale, each in zip(scales, sections, strict=True))
    return (value / weight[..., None])[..., : size - settings.key_only].to(qkv.dtype).reshape(tokens, -1)


def product(x_TX, weight_YX, bias_Y=None, dtype=None):
    y_TY = F.linear(x_TX.float(), weight_YX.float(), None if bias_Y is None else bias_Y.float())
    return y_TY.to(dtype or x_TX.dtype)


def gemv(x_1X, weight, bias_Y=None, dtype=None, *, norm=None, delta_1X=None, gated=False):
    sum_1X = x_1X if delta_1X is None else x_1X + delta_1X
    value = sum_1X if norm is None else _normalise(sum_1X, *norm)
    y = product(value, weight, bias_Y, x_1X.dtype if gated else dtype)
    return (swiglu(y).to(dtype or x_1X.dtype) if gated else y), sum_1X


def grouped_product(x_NX, weight_EYX, ends_E):
    expert_N = torch.searchsorted(ends_E, torch.arange(len(x_NX), device=x_NX.device, dtype=torch.int32), right=True)
    weight_NYX = weight_EYX[expert_N.clamp(max=len(ends_E) - 1)].float()
    y_NY = torch.einsum("nx,nyx->ny", x_NX.float(), weight_NYX).to(x_NX.dtype)
    return y_NY.masked_fill((expert_N == len(ends_E))[:, None], torch.nan)  # the kernel leaves these as they are


def swiglu(up_TF):
    gate_TF, up_TF = up_TF.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


def summarize_logits(logits_RV, draws_3R):
    temperature_R, uniform_R, target_R = draws_3R
    highest_R, best_R = logits_RV.max(dim=1)  # the first among equals; a NaN, if there is one
    shifted_RV = logits_RV.double() - highest_R[:, None].double()
    weights_RV = (shifted_RV / temperature_R.clamp(min=1e-9)[:, None]).exp()
    sums_RV = weights_RV.cumsum(1)
    drawn_R = torch.searchsorted(sums_RV, uniform_R[:, None] * sums_RV[:, -1:], right=True)[:, 0]
    drawn_R = torch.where(temperature_R > 0, drawn_R.clamp(max=logits_RV.shape[1] - 1), best_R)
    logit = lambda token_R: logits_RV.gather(1, token_R[:, None].long())[:, 0]  # noqa: E731
    columns = best_R, highest_R, shifted_RV.exp().sum(1), sums_RV[:, -1] * (temperature_R > 0), drawn_R
    return torch.stack([each.double() for each in (*columns, logit(drawn_R), logit(target_R))], dim=1)
