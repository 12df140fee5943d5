"""Largest accepted sizes in files and on command lines, in one table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from meshwright.errors import UserError


@dataclass(frozen=True, slots=True)
class Limit:
    """Upper limit of a size in files and on command lines. most: largest accepted value. reason: explanation for the
    error message why larger values are not needed."""

    most: int
    reason: str


LIMITS: dict[str, Limit] = {
    "count": Limit(2**53, "the largest range in which float64 represents every integer"),
    # --- a model
    "layers": Limit(1_024, "published models have up to 1,000 (DeepNet, arXiv:2203.00555), decoders up to 126"),
    "hidden": Limit(2**20, "published models have up to 53,248 (intermediate size of Llama 3.1 405B)"),
    "heads": Limit(2**16, "published models have up to 128"),
    "kv_heads": Limit(2**16, "as heads"),
    "head_dim": Limit(2**20, "as hidden"),
    "intermediate": Limit(2**24, "16 times the largest hidden size"),
    "vocabulary": Limit(2**24, "published tokenizers have up to 1,000,000 tokens (XLM-V)"),
    "max_positions": Limit(2**30, "published models have up to 10,485,760 (Llama 4 Scout)"),
    "sliding_window": Limit(2**30, "as max_positions"),
    "experts": Limit(2**14, "published models have up to 2,048 (Switch-C, arXiv:2101.03961)"),
    "experts_per_token": Limit(2**14, "as experts"),
    "expert_intermediate": Limit(2**24, "as intermediate"),
    "shared_intermediate": Limit(2**24, "as intermediate"),
    "all_experts": Limit(2**16, "layers x experts: published models have up to 30,720 (Switch-C: 15 x 2,048)"),
    "labels": Limit(2**17, "classes of an encoder's head"),
    "token_types": Limit(2**16, "kinds of segments of an encoder"),
    "adapter_rank": Limit(2**16, "published adapters have up to 1,024"),
    # --- training
    "steps": Limit(10**12, "one step per millisecond for 30 years"),
    "batch": Limit(2**24, "sequences per step; published runs use up to 2**24 tokens per step"),
    "sequence": Limit(2**27, "13 times the published 10,485,760 positions (Llama 4 Scout)"),
    "seconds": Limit(10**9, "30 years"),
    "threads": Limit(1024, "per rank: more threads than cores only wait, and libgomp crashes at several thousand"),
    "local_threads": Limit(1024, "threads of all ranks on one machine, or 4 per processor if that is more"),
    "documents": Limit(2**30, "sequences that are read for a validation loss"),
    "characters": Limit(2**40, "characters in a document"),
    "words": Limit(10**6, "words in an n-gram"),
    "shard_tokens": Limit(2**36, "tokens in one file of the cache"),
    # --- ranks and programs
    "ranks": Limit(2**20, "published clusters have up to 200,000 devices"),
    "local_ranks": Limit(64, "processes on one machine, or 4 per processor if that is more"),
    "micro_batches": Limit(2**20, "micro-batches per step of one pipeline"),
    "bytes": Limit(2**60, "bytes of a vector"),
    "new_tokens": Limit(2**30, "as max_positions"),
    "choices": Limit(128, "as OpenAI's API"),
    # --- files
    "config_bytes": Limit(2**24, "config.json and similar files: published ones have up to 100,000 bytes"),
    "json_bytes": Limit(2**26, "tokenizer.json, indexes, manifests: published ones have up to 33 MB (Gemma 3)"),
    "checkpoint_bytes": Limit(2**30, "metadata of a checkpoint or of prepared data: some bytes per rank and tensor"),
    "program_bytes": Limit(2**28, "pipeline and collective programs: about 40 bytes per step, 6 million steps"),
    "word_list_bytes": Limit(2**26, "published lists of blocked words have up to 30,000 bytes"),
    "metrics_bytes": Limit(2**32, "metrics.jsonl: about 400 bytes per step, 10 million steps"),
    "recipe_bytes": Limit(2**20, "recipes and cluster files, which are written by hand"),
    "nesting": Limit(64, "levels of lists and objects in JSON and TOML"),
}


def get_limit(name: str) -> int:
    """Return the largest accepted value of the size called `name` in `LIMITS`, such as "layers"."""
    return LIMITS[name].most


def make_limit_error(name: str, value: Any, called: str | None = None) -> str | None:
    """Return an error text, such as "layers 1000000000 is too large: at most 1,024 (...)", if `value` is a number above
    the limit called `name` in `LIMITS`; else None. called: name of the value in the text, by default `name`."""
    limit = LIMITS[name]
    if not isinstance(value, (int, float)) or value <= limit.most:
        return None
    subject = name if called is None else called
    return f"{subject} {shorten_repr(value)} is too large: at most {limit.most:,} ({limit.reason})"


def check_count(name: str, value: Any, limit: str) -> None:
    """Raise `UserError` if `value`, which the user knows as `name`, is not a whole number from 1 to the limit called
    `limit` in `LIMITS`."""
    if not isinstance(value, Integral) or value < 1:
        raise UserError(f"{name} {value}: should be 1 or more")
    if problem := make_limit_error(limit, int(value), name):
        raise UserError(problem)


def is_finite_number(value: object) -> bool:
    """Return True for an int or float (not a bool) whose value is finite as a float; False for an integer beyond a
    float's range."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def shorten_repr(value: object) -> str:
    """Return the `repr` of a wrong value for an error message, cut to 60 characters; a huge integer is replaced by its
    number of digits."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 240:
        return f"a number of about {int(value.bit_length() * 0.30103) + 1:,} digits"
    return shorten(repr(value))


def shorten(text: str, width: int = 60) -> str:
    """Return `text`, cut to `width` characters that end in "..." if it is longer."""
    return text if len(text) <= width else f"{text[: width - 3]}..."
