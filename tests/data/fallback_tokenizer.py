"""A tokenizer with byte fallback, as SentencePiece makes it."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def fallback_tokenizer() -> Tokenizer:
    """In the manner of SentencePiece: spaces in words, dropped before the first; unknown characters as bytes."""
    vocabulary = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer
