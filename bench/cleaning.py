"""Cleaning against datatrove and rensa on one core: the same rules on the same file, and MinHash signatures.

python bench/cleaning.py [--turns 5] [--megabytes 8]

The corpus is made of this Python's standard library: pieces of 1 to 8 thousand characters, a tenth of them repeated,
another tenth repeated with a few words changed. datatrove's words are what white space separates, as ours are (its own
need spaCy, which is slower), and its exact deduplication ends with the list of what to drop.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import rensa
from datatrove.pipeline.dedup.exact_dedup import ExactDedupConfig, ExactDedupSignature, ExactFindDedups
from datatrove.pipeline.filters import (
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
    fineweb_quality_filter,
    gopher_quality_filter,
    gopher_repetition_filter,
)
from datatrove.pipeline.readers import JsonlReader
from datatrove.utils.logging import logger

sys.path.insert(0, str(Path(__file__).parent))
from common import paired_ratio, peak_resident_bytes, write_result
from meshwright.data.cleaning.cleaning_pass import run_cleaning_pass
from meshwright.data.cleaning.minhash import MinHash
from meshwright.data.cleaning.rules import Cleaner
from meshwright.data.cleaning.segments import KEPT
from meshwright.data.sources.reading import Reader
from meshwright.data.sources.resolution import SourceFile, find_files
from meshwright.recipe import CleanRecipe

RULES = CleanRecipe(heuristics=["gopher-quality", "gopher-repetition", "fineweb"], maximum_repetition=1.0)
SETTINGS = {
    "default rules": CleanRecipe(),
    "published rules (Gopher, FineWeb)": RULES,
    "default rules and masks": CleanRecipe(mask=["key", "email", "phone", "ip"]),
    "default rules and MinHash": CleanRecipe(near_duplicates=True),
    "all but MinHash and languages": RULES.model_copy(update={"mask": ["key", "email", "phone", "ip"]}),
}


def corpus(path: Path, size: int) -> list[str]:
    """Write the documents as JSON Lines."""
    draw = random.Random(0)
    texts: list[str] = []
    total = 0
    for file in find_files(["stdlib"]):
        text = file.path.read_text(encoding="utf-8", errors="ignore")
        while len(text) > 300:
            piece, text = text[: (cut := draw.randint(1_000, 8_000))], text[cut:]
            texts.append(piece)
            chance = draw.random()
            if chance < 0.1:
                texts.append(draw.choice(texts))
            elif chance < 0.2:
                words = draw.choice(texts).split(" ")
                for _ in range(3):
                    words[draw.randrange(len(words))] = "changed"
                texts.append(" ".join(words))
            total += len(texts[-1]) + len(piece)
        if total > size:
            break
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def ours(path: Path, recipe: CleanRecipe) -> tuple[int, set[int]]:
    """(documents kept, those dropped by what is no duplicate)."""
    with tempfile.TemporaryDirectory() as work:
        file = SourceFile(path.name, path, "jsonl", True)
        result = run_cleaning_pass([file], Reader(), Cleaner(recipe), Path(work), lambda line: None)
        judged = {number for number, code in enumerate(result.codes.tolist()) if code != KEPT}
        return result.kept, judged


def datatroves(path: Path) -> int:
    """Documents kept by datatrove's filters and exact deduplication."""
    words = lambda text, language=None: text.split()  # noqa: E731
    for module in (gopher_repetition_filter, gopher_quality_filter, fineweb_quality_filter):
        module.split_into_words = words
    with tempfile.TemporaryDirectory() as work:

        def content(document: Any) -> bytes:
            return document.text.encode()

        content.__annotations__["return"] = bytes  # datatrove's choice of hash depends on it
        config = ExactDedupConfig(content_getter=content)
        data = JsonlReader(str(path.parent), glob_pattern=path.name).run()
        for step in (
            GopherQualityFilter(),
            GopherRepetitionFilter(),
            FineWebQualityFilter(char_duplicates_ratio=0.1, new_line_ratio=1e9),
        ):
            data = step.run(data)
        kept = 0

        def counted(data: Any) -> Any:
            nonlocal kept
            for document in data:
                kept += 1
                yield document

        ExactDedupSignature(f"{work}/signatures", config).run(counted(data))
        ExactFindDedups(f"{work}/signatures", f"{work}/duplicates", config).run()
        dropped = sum(path.stat().st_size // 4 for path in Path(work, "duplicates").rglob("*.c4_dup"))
        return kept - dropped


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    result = call()
    return time.perf_counter() - begun, result


def signatures(texts: list[str], minhash: MinHash) -> list[Any]:
    return [minhash.compute_signature(minhash.hash_shingles(text)) for text in texts]


def rensas(texts: list[str], minhash: MinHash) -> list[Any]:
    """The same shingles in Python, signed by rensa."""
    made = []
    for text in texts:
        words = re.sub(r"[\W_]+", " ", text.lower()).split()
        signer = rensa.RMinHash(minhash.bands * minhash.rows, 42)
        signer.update([" ".join(words[at : at + 5]) for at in range(len(words) - 4)])
        made.append(signer)
    return made


def estimates(texts: list[str], minhash: MinHash) -> dict[str, float]:
    """Root mean square error of both estimates of Jaccard similarity, over pairs of texts more or less alike."""
    draw = random.Random(1)
    errors: dict[str, list[float]] = {"ours": [], "rensa": []}
    for text in draw.sample(texts, 200):
        words = re.sub(r"[\W_]+", " ", text.lower()).split()
        share = draw.random() * 0.2
        other = ["changed" if draw.random() < share else word for word in words]
        runs = [{tuple(side[at : at + 5]) for at in range(len(side) - 4)} for side in (words, other)]
        truth = len(runs[0] & runs[1]) / max(1, len(runs[0] | runs[1]))
        pair = [" ".join(words), " ".join(other)]
        mine, theirs = signatures(pair, minhash), rensas(pair, minhash)
        errors["ours"].append(float((mine[0] == mine[1]).mean()) - truth)
        errors["rensa"].append(theirs[0].jaccard(theirs[1]) - truth)
    return {name: round(statistics.fmean(error**2 for error in found) ** 0.5, 4) for name, found in errors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=8)
    arguments = parser.parse_args()
    logger.remove()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "corpus.jsonl")
        texts = corpus(path, int(arguments.megabytes * 1e6))
        megabytes = sum(len(text.encode()) for text in texts) / 1e6
        rates: dict[str, list[float]] = {name: [] for name in SETTINGS}
        mine, theirs, signed, signed_by_rensa = [], [], [], []
        minhash = MinHash(14, 8, 5)
        for _ in range(arguments.turns):
            for name, recipe in SETTINGS.items():
                rates[name].append(timed(lambda recipe=recipe: ours(path, recipe))[0])
            seconds, (kept, _) = timed(lambda: ours(path, RULES))
            mine.append(seconds)
            seconds, kept_by_datatrove = timed(lambda: datatroves(path))
            theirs.append(seconds)
            signed.append(timed(lambda: signatures(texts[:1000], minhash))[0])
            signed_by_rensa.append(timed(lambda: rensas(texts[:1000], minhash))[0])
        peak = peak_resident_bytes()
        write_result(
            "cleaning",
            {
                "documents": len(texts),
                "megabytes": round(megabytes, 2),
                "megabytes_per_second": {
                    name: round(megabytes / statistics.median(seconds), 2) for name, seconds in rates.items()
                },
                "datatrove": {
                    "version": metadata.version("datatrove"),
                    "times_as_fast": paired_ratio(mine, theirs),
                    "megabytes_per_second": round(megabytes / statistics.median(theirs), 2),
                    "kept": kept_by_datatrove,
                    "kept_by_us": kept,
                },
                "rensa": {
                    "version": metadata.version("rensa"),
                    "times_as_fast": paired_ratio(signed, signed_by_rensa),
                    "root_mean_square_error": estimates(texts, minhash),
                },
                "peak_resident_bytes": peak,
            },
        )


if __name__ == "__main__":
    main()
