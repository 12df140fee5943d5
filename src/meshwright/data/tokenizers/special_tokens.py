"""Encoding of text so that it is never tokenized as a special token, whatever it spells.

The option `encode_special_tokens` of the `tokenizers` library does not suffice if the model's own vocabulary contains
special tokens: Unigram accepts `</s>` as any subword, WordLevel as a word; and an end-of-text token may have been added
as an ordinary one."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from meshwright.data.files import read_json
from meshwright.data.tokenizers.library import convert_library_errors


def parse_special_tokens(config: Mapping[str, Any]) -> set[str]:
    """Return the special tokens that the parsed tokenizer_config.json or special_tokens_map.json `config` names: under
    keys such as `eos_token`, in lists of additional tokens, and as added tokens marked special.
    """
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
    return set(filter(None, map(get_token_text, named)))


def get_token_text(token: Any) -> str | None:
    """Return the text of a token in Hugging Face's JSON files: a string, or the `content` of an object; None if it is
    neither.
    """
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def read_special_tokens(directory: Path) -> set[str]:
    """Read the special tokens that tokenizer_config.json and special_tokens_map.json in `directory` name; a file that
    is missing or damaged is skipped.
    """
    found = (read_json(directory / name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
    return {token for config in found if isinstance(config, dict) for token in parse_special_tokens(config)}


def find_special_tokens(tokenizer: Tokenizer, named: Iterable[str] = ()) -> frozenset[str]:
    """Return the special tokens of a tokenizer: tokens that its tokenizer.json marks as special, and tokens of `named`
    if its vocabulary has them. Single characters are excluded: some publishers pad with "!", and the exclamation mark
    must remain text.
    """
    marked = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    return frozenset(
        token for token in marked | set(named) if len(token) > 1 and tokenizer.token_to_id(token) is not None
    )


def make_text_encoder(tokenizer: Tokenizer, special: Collection[str]) -> Tokenizer:
    """Return a tokenizer with the same ids that encodes every text as ordinary text, even text that spells a token of
    `special`. This is `tokenizer` itself if its option `encode_special_tokens` suffices. Otherwise it is a copy in
    which the tokens of `special` have random names."""
    tokenizer.encode_special_tokens = True
    hidden = _list_tokens_to_rename(tokenizer, special)
    state = _find_state_to_rename(tokenizer, hidden)
    if state is None:
        return tokenizer
    encoder, _ = _rename_tokens(state, hidden)
    encoder.encode_special_tokens = True
    return encoder


def make_template_encoder(tokenizer: Tokenizer, special: Collection[str]) -> tuple[Tokenizer, dict[str, str]]:
    """Build a copy of a tokenizer, with the same ids, in which each token of `special` has a random name; return (copy,
    {special token: random name}). Only the random name is encoded as that special token; text that spells its old name
    is ordinary text."""
    encoder, names = _rename_tokens(json.loads(tokenizer.to_str()), _list_tokens_to_rename(tokenizer, special))
    encoder.no_padding()
    encoder.no_truncation()
    encoder.encode_special_tokens = False
    return encoder, {token: names[token] for token in special}


def _list_tokens_to_rename(tokenizer: Tokenizer, special: Collection[str]) -> set[str]:
    """Return the tokens that need random names so that no text is encoded as one of them: `special`, and the
    unknown-text token of `tokenizer`.
    """
    unknown = find_unknown_token(tokenizer)
    return {*special, *([unknown] if unknown is not None and len(unknown) > 1 else [])}


def _rename_tokens(state: dict[str, Any], hidden: Set[str]) -> tuple[Tokenizer, dict[str, str]]:
    """Build a copy of a tokenizer in which the tokens `hidden` have random names; returns (copy, {token: random name}).
    state: the parsed tokenizer.json, which is modified.
    """
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
        model["merges"] = [merge for merge in model["merges"] if hidden.isdisjoint(_split_merge(merge))]
    state["post_processor"] = None  # it adds special tokens, which text must not get, by name
    with convert_library_errors("its special tokens cannot be kept out of text"):
        return Tokenizer.from_str(json.dumps(state)), names


def _find_state_to_rename(tokenizer: Tokenizer, hidden: Set[str]) -> dict[str, Any] | None:
    """Return the parsed tokenizer.json if the caller must rename the tokens `hidden` in it, because plain text can be
    encoded as one of them even with the tokenizer's option `encode_special_tokens`. Return None if plain text cannot be
    encoded as one of them."""
    added = tokenizer.get_added_tokens_decoder().values()
    spelled = any(token.content in hidden for token in added if not token.special)
    if not spelled and all(tokenizer.model.token_to_id(token) is None for token in hidden):
        return None
    state: dict[str, Any] = json.loads(tokenizer.to_str())
    if not spelled and isinstance(tokenizer.model, models.BPE) and not tokenizer.model.ignore_merges:
        # BPE writes a token only by a merge.
        spelled = any(not hidden.isdisjoint(_split_merge(merge)) for merge in state["model"]["merges"])
        return state if spelled else None
    return state


def find_unknown_token(tokenizer: Tokenizer) -> str | None:
    """Return the token that the model of `tokenizer` uses for text outside its vocabulary, or None if it has none."""
    model = tokenizer.model
    if isinstance(model, models.Unigram):
        number = json.loads(tokenizer.to_str())["model"]["unk_id"]
        return None if number is None else tokenizer.id_to_token(number)
    return getattr(model, "unk_token", None)


def _split_merge(merge: Any) -> tuple[str, str, str]:
    """Return (left token, right token, merged token) of a BPE merge, given as "left right" or [left, right]."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right
