"""Text stays text: a tokenizer that never makes a special token of it, however the text is spelled.

`tokenizers` can be told not to look for special tokens in text (`encode_special_tokens`). That is not enough where the
model's own vocabulary holds them: Unigram takes `</s>` as a piece like any other, WordLevel as a word. And a token that
ends a text may have been added as an ordinary one.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from meshwright.data.files import read_json


def named_special(config: Mapping[str, Any]) -> set[str]:
    """The tokens that a tokenizer_config.json or special_tokens_map.json names as special."""
    named = [value for key, value in config.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(key) or []
        named += list(more.values()) if isinstance(more, dict) else more if isinstance(more, list) else []
    decoder = config.get("added_tokens_decoder")
    named += [
        token
        for token in (decoder.values() if isinstance(decoder, dict) else ())
        if isinstance(token, dict) and token.get("special")
    ]
    contents = (value.get("content") if isinstance(value, dict) else value for value in named)
    return {content for content in contents if isinstance(content, str)}


def named_in(directory: Path) -> set[str]:
    """The tokens that the files beside a tokenizer.json name as special; files that cannot be read name none."""
    found = (read_json(directory / name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
    return {token for config in found if isinstance(config, dict) for token in named_special(config)}


def special_tokens(tokenizer: Tokenizer, named: Iterable[str] = ()) -> frozenset[str]:
    """The special tokens of `tokenizer`: those that it marks, and those of `named` that it has.

    A token of one character is text: publishers pad with "!", and the exclamation mark stays one.
    """
    marked = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    return frozenset(
        token for token in marked | set(named) if len(token) > 1 and tokenizer.token_to_id(token) is not None
    )


def text_encoder(tokenizer: Tokenizer, special: Collection[str]) -> Tokenizer:
    """A tokenizer that encodes text as `tokenizer` does, with the same ids, and never as a token of `special`.

    It is `tokenizer` itself where telling it so is enough, else a copy in which these tokens have names that nobody can
    write: random ones. Ids and everything else stay, so text that spells a special token is cut as any other text is.
    """
    tokenizer.encode_special_tokens = True
    hidden = _hidden(tokenizer, special)
    state = _state_if_spelled(tokenizer, hidden)
    if state is None:
        return tokenizer
    encoder, _ = _renamed(state, hidden)
    encoder.encode_special_tokens = True
    return encoder


def template_encoder(tokenizer: Tokenizer, special: Collection[str]) -> tuple[Tokenizer, dict[str, str]]:
    """A tokenizer that makes tokens of `special` only of the names given here for them, which nobody can write; all
    else, what spells one of them too, it encodes as text. Ids are those of `tokenizer`."""
    encoder, names = _renamed(json.loads(tokenizer.to_str()), _hidden(tokenizer, special))
    encoder.no_padding()
    encoder.no_truncation()
    encoder.encode_special_tokens = False
    return encoder, {token: names[token] for token in special}


def _hidden(tokenizer: Tokenizer, special: Collection[str]) -> set[str]:
    unknown = unknown_token(tokenizer)
    return {*special, *([unknown] if unknown is not None and len(unknown) > 1 else [])}


def _renamed(state: dict[str, Any], hidden: Set[str]) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of this JSON in which these tokens have other names, and which."""
    nonce = secrets.token_hex(16)
    names = {token: f"{nonce}-{number}-" for number, token in enumerate(sorted(hidden))}
    for token in state["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = state["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): number for token, number in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if hidden.isdisjoint(_parts(merge))]
    state["post_processor"] = None  # adds special tokens, which text does not get, and knows them by their names
    return Tokenizer.from_str(json.dumps(state)), names


def _state_if_spelled(tokenizer: Tokenizer, hidden: Set[str]) -> dict[str, Any] | None:
    """The tokenizer's JSON, if text could become one of these tokens although it does not look for special ones."""
    added = tokenizer.get_added_tokens_decoder().values()
    spelled = any(token.content in hidden for token in added if not token.special)
    if not spelled and all(tokenizer.model.token_to_id(token) is None for token in hidden):
        return None
    state: dict[str, Any] = json.loads(tokenizer.to_str())
    if not spelled and isinstance(tokenizer.model, models.BPE) and not tokenizer.model.ignore_merges:
        spelled = any(not hidden.isdisjoint(_parts(merge)) for merge in state["model"]["merges"])  # as nothing else can
        return state if spelled else None
    return state


def unknown_token(tokenizer: Tokenizer) -> str | None:
    """What the model writes for text that it does not know."""
    model = tokenizer.model
    if isinstance(model, models.Unigram):
        number = json.loads(tokenizer.to_str())["model"]["unk_id"]
        return None if number is None else tokenizer.id_to_token(number)
    return getattr(model, "unk_token", None)


def _parts(merge: Any) -> tuple[str, str, str]:
    """Both sides of a BPE merge, and what they make."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right
