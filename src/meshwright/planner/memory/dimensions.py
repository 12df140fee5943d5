"""Dimensions and properties of a layer on one rank, from which sizes and conditions in this package's tables are made
(`tables.py`)."""

from __future__ import annotations

from meshwright.planner.cost.micro_batch import ITEM_BYTES, LayerKind, MicroBatch, Number

RANDOM_STATE = 632
"""Numbers of eight bytes in the state of a CPU's random numbers."""


def list_dimensions(batch: MicroBatch, kind: LayerKind) -> dict[str, Number]:
    """Return {name: value} of the dimensions of a layer of one kind on a rank. Bytes of an element: `x` of activations,
    `wide` of sums.

    Tokens: `tokens` of a sequence on a cp rank, `slice` of them in norms and the residual stream, `stream` numbers of
    the residual stream, `copies` pairs of token and chosen expert. Attention: `inner` features of its result; `core_*`
    sizes of its kernel, under Ulysses those after the all-to-all, with `core_keys` key-value heads after their
    repetition and `core_all` heads of queries, keys and values; `lines` queries of the log-sum-exp, padded. Norms:
    `statistics` float32 numbers of a vector, `saved_statistics` those that an encoder's norm saves in the type of
    activations. `up`: outputs of an up projection with its gate. `summed` is 1 with tp, else 0.
    """
    config, layout = batch.config, batch.layout
    heads, kv_heads, length = batch.heads, batch.kv_heads, batch.tokens
    if batch.ulysses:  # those of attention, after the all-to-all
        heads, kv_heads, length = heads // batch.cp, kv_heads * batch.key_value_copies // batch.cp, batch.sequence
    cuda = batch.device == "cuda" and not batch.ring
    padded = cuda and (batch.dense_mask(kind.window) or not batch.narrow)
    windowed = kind.window is not None and kind.window < batch.sequence
    mask_rows = batch.rows if batch.masked else 1
    width, shared = config.intermediate // batch.tp, config.shared_intermediate // batch.tp
    expert = config.expert_intermediate // (batch.etp if batch.expert_parallel else batch.tp)
    return {
        "x": batch.itemsize, "wide": batch.wide, "rows": batch.rows, "tokens": batch.tokens, "slice": batch.slice,
        "sequence": batch.sequence, "all_tokens": batch.rows * batch.tokens, "hidden": config.hidden,
        "stream": batch.rows * batch.slice * config.hidden, "summed": int(layout.tp > 1),
        "statistics": 2 if config.norm == "layernorm" else 1, "saved_statistics": 2 if batch.narrow else 1,
        "qkv": batch.qkv_width, "heads": batch.heads, "kv_heads": batch.kv_heads, "head": config.head_dim,
        "inner": batch.heads * config.head_dim, "core_heads": heads, "core_tokens": length,
        "core_keys": heads if batch.repeats(kind.window) else kv_heads, "core_all": heads + 2 * kv_heads,
        "lines": -(-length // 32) * 32 if padded else length, "mask_rows": mask_rows,
        "visible_rows": batch.rows if windowed and config.window_chunks else mask_rows, "random_state": RANDOM_STATE,
        "up": width * (2 if config.gated else 1), "width": width, "experts": config.experts,
        "experts_here": config.experts // batch.ep, "chosen": config.experts_per_token, "copies": batch.copies,
        "mixture_tokens": batch.slice if batch.expert_parallel else batch.tokens,
        "expert_up": 2 * expert, "expert_width": expert, "shared_up": 2 * shared, "shared_width": shared,
        "predictions": batch.predictions, "vocabulary": batch.vocabulary, "words": config.vocabulary,
        "labels": len(config.labels),
    }  # fmt: skip


def list_properties(batch: MicroBatch, kind: LayerKind) -> frozenset[str]:
    """Return the names of the properties that are true of a layer of one kind: of its architecture, such as "gated",
    its layout, such as "ring" or the kind of recompute, and the device.

    Kind of layer: "encoder", "dense", "mixture", or "front" for one whose mixture is expert-parallel, so that only the
    part before the mixture is compiled. With tp, outputs are "summed" over ranks; with sequence parallelism a rank
    "gathers" inputs. "cuda_attention": PyTorch's CUDA kernels compute attention; "repeated": keys and values are
    repeated for every query head; "rotated": queries and keys are copies, made by rotary positions or norms.
    """
    config, layout, window = batch.config, batch.layout, kind.window
    cuda = batch.device == "cuda"
    mixture = ("front" if batch.expert_parallel else "mixture") if kind.mixed else "dense"
    every = {
        "encoder" if config.encoder else mixture: True, layout.recompute: True, config.router: True, config.norm: True,
        f"{config.head}_head": True, "summed": layout.tp > 1,
        "gathers": layout.tp > 1 and layout.tensor_sequence_parallel, "ring": batch.ring, "ulysses": batch.ulysses,
        "split_sequence": layout.cp > 1, "cuda": cuda, "cuda_attention": cuda and not batch.ring,
        "narrow": batch.narrow, "masked": batch.masked, "capped": batch.capped, "flash": batch.flash,
        "varlen": batch.varlen(window), "limited": batch.limited(window),
        "windowed": window is not None and window < batch.sequence,
        "rotated": kind.rotates or config.query_key_norm, "query_key_norm": config.query_key_norm,
        "tempered": kind.tempered, "repeated": batch.repeats(window),
        "dense_mask": cuda and not batch.ring and batch.dense_mask(window), "gated": config.gated,
        "adapter": config.adapter is not None, "shared": config.shared_intermediate > 0,
        "shared_gate": config.shared_gate, "normalised": config.normalise_choice, "router_loss": config.router_loss,
        "router_bias": config.router_bias, "wide_router": config.router == "sigmoid" and batch.narrow,
        "tied": config.tied, "labelled": bool(config.labels),
    }  # fmt: skip
    return frozenset(name for name, value in every.items() if value)


def element_types(dtype: str) -> dict[str, str]:
    """Return {element type of `SavedTensor`, such as "wide": torch's type name}. dtype: torch's type name of
    activations and parameters."""
    wide = dtype if dtype == "float64" else "float32"
    return {"x": dtype, "wide": wide, "index": "int64", "int32": "int32", "bool": "bool"}


def element_bytes(dtype: str, kind: str) -> int:
    """Return the bytes of an element. dtype: torch's type name of activations; kind: element type of `SavedTensor`."""
    return ITEM_BYTES[element_types(dtype)[kind]]
