"""Throughput from text to packed tokens: Meshwright's encoding and packing against bare `tokenizers.encode_batch`.

The text: the standard library's sources and, where it is there, tiny Shakespeare, 4 MB. Each kind of tokenizer is
trained on it, and one is as SentencePiece's models come, whose special tokens are pieces of the model. In turns:
`encode_batch` of the library with its results left as they are; `TextTokenizer.encode`, which also makes arrays and
looks for special tokens; `ShardWriter.write_missing`, which also frames, hashes, writes and syncs shards.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from common import paired_ratio, write_result
from meshwright.data.packing.shards import ShardWriter, TextEncoder
from meshwright.data.sources.reading import Document
from meshwright.data.tokenizers.kinds import KINDS
from meshwright.data.tokenizers.tokenizer import TextTokenizer, load_tokenizer, write_tokenizer

SHAKESPEARE = Path(__file__).resolve().parents[2] / "shared" / "data" / "tinyshakespeare.txt"


def corpus(limit: int) -> list[str]:
    """Documents of up to 100,000 characters, `limit` bytes in all at most."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    files += sorted(Path(sysconfig.get_path("stdlib")).glob("[a-s]*/*.py"))
    texts = [path.read_text(errors="replace") for path in files if "site-packages" not in path.parts]
    if SHAKESPEARE.exists():
        texts.insert(0, SHAKESPEARE.read_text())
    documents, size = [], 0
    for text in texts:
        for begin in range(0, len(text), 100_000):
            documents.append(text[begin : begin + 100_000])
            size += len(documents[-1].encode())
            if size >= limit:
                return documents
    return documents


def trained(name: str, texts: list[str]) -> TextTokenizer:
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory), name, 8192, None, iter(texts))
        return load_tokenizer(Path(directory))


def as_sentencepiece(texts: list[str]) -> TextTokenizer:
    """The Unigram tokenizer with the space as U+2581 and `</s>` among the pieces: text needs an encoder of its own."""
    vocabulary = json.loads(trained("unigram", texts).tokenizer.to_str())["model"]["vocab"]
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((piece.replace(" ", "▁"), score) for piece, score in vocabulary[257:])]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return TextTokenizer(tokenizer, 1, 1)


def seconds(run: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    result = run()
    took = time.perf_counter() - begun
    del result
    return took


def pack(tokenizer: TextTokenizer, texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        numbered = list(enumerate(Document("", text) for text in texts))
        source = lambda first: iter(numbered[first:])  # noqa: E731
        encoder = TextEncoder(tokenizer)
        packer = ShardWriter(Path(directory), source, [len(texts)], encoder, "", 1 << 26, keep_text=False)
        packer.write_missing(lambda done: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    texts = corpus(options.megabytes * 1_000_000)
    size = sum(len(text.encode()) for text in texts)
    results: dict[str, Any] = {}
    for name in [*KINDS, "sentencepiece"]:
        tokenizer = as_sentencepiece(texts) if name == "sentencepiece" else trained(name, texts)
        bare = Tokenizer.from_str(tokenizer.tokenizer.to_str())
        ways: dict[str, Callable[[], Any]] = {
            "bare": lambda bare=bare: bare.encode_batch(texts, add_special_tokens=False),
            "encode": lambda tokenizer=tokenizer: tokenizer.encode(texts),
            "pack": lambda tokenizer=tokenizer: pack(tokenizer, texts),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for repeat in range(options.repeats + 1):
            for way, run in ways.items():
                took = seconds(run)
                if repeat:  # the first round is warm-up
                    times[way].append(took)
        results[name] = {
            "megabytes_per_second": {
                way: round(size / statistics.median(taken) / 1e6, 2) for way, taken in times.items()
            },
            "encode_against_bare": paired_ratio(times["encode"], times["bare"]),
            "pack_against_bare": paired_ratio(times["pack"], times["bare"]),
        }
        print(name, results[name], flush=True)
    write_result("tokenizing", {"bytes": size, "documents": len(texts), "repeats": options.repeats, "kinds": results})


if __name__ == "__main__":
    main()
