"""Reading texts out of Parquet and JSON Lines against `datasets`: the same file, the same texts, taking turns.

`datasets` is measured in each of its ways to read a local file: streamed example by example, streamed in batches, and
loaded (converted into its own cache, then read from there). Meshwright must not be slower than the fastest. Run it when
nothing else runs.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pyarrow
import pyarrow.parquet

from common import paired_ratio, write_result
from meshwright.data.sources.reading import Reader
from meshwright.data.sources.resolution import find_files

ROUNDS = 9
MEGABYTES = 100
KINDS = {"parquet": "texts.parquet", "json lines": "texts.jsonl"}


def write_texts(directory: Path) -> int:
    """The same texts as Parquet and as JSON Lines, of the lengths of web pages; how many characters they have."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, 10))) for _ in range(20_000)]
    words += ['"quoted"', "naïve", "\n", "\n\n", "世界", "back\\slash"] * 300
    texts: list[str] = []
    size = 0
    while size < MEGABYTES << 20:
        texts.append(" ".join(rng.choices(words, k=int(rng.lognormvariate(5.5, 1.0)) + 1)))
        size += len(texts[-1].encode())
    rows = {"id": list(range(len(texts))), "text": texts, "score": [rng.random() for _ in texts]}
    pyarrow.parquet.write_table(pyarrow.table(rows), directory / KINDS["parquet"], row_group_size=10_000)
    with (directory / KINDS["json lines"]).open("w") as file:
        for row in zip(*rows.values(), strict=True):
            file.write(json.dumps(dict(zip(rows, row, strict=True)), ensure_ascii=False) + "\n")
    return sum(map(len, texts))


def ours(path: Path) -> int:
    [file] = find_files([str(path)])
    return sum(len(document.text or "") for document in Reader().read_documents(file))


def streamed(path: Path) -> int:
    return sum(len(example["text"]) for example in _dataset(path, streaming=True))


def streamed_in_batches(path: Path) -> int:
    return sum(len(text) for batch in _dataset(path, streaming=True).iter(1000) for text in batch["text"])


def loaded(path: Path) -> int:
    shutil.rmtree(os.environ["HF_DATASETS_CACHE"], ignore_errors=True)
    return sum(len(text) for batch in _dataset(path, streaming=False).iter(1000) for text in batch["text"])


def _dataset(path: Path, streaming: bool):
    from datasets import load_dataset

    kind = "parquet" if path.suffix == ".parquet" else "json"
    return load_dataset(kind, data_files=str(path), split="train", streaming=streaming)


def seconds(read: Callable[[Path], int], path: Path, characters: int) -> float:
    begun = time.perf_counter()
    count = read(path)
    taken = time.perf_counter() - begun
    assert count == characters, (read.__name__, count, characters)
    return taken


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        os.environ["HF_DATASETS_CACHE"] = str(directory / "cache")  # `datasets` reads it at import
        os.environ["HF_HUB_OFFLINE"] = "1"
        import datasets

        datasets.disable_progress_bars()
        characters = write_texts(directory)
        readers = (ours, streamed, streamed_in_batches, loaded)
        results = {}
        for kind, file in KINDS.items():
            path = directory / file
            times: dict[str, list[float]] = {reader.__name__: [] for reader in readers}
            for turn in range(ROUNDS + 1):
                for reader in readers:
                    taken = seconds(reader, path, characters)
                    if turn:  # the first one is a warm-up
                        times[reader.__name__].append(taken)
            medians = {reader: statistics.median(taken) for reader, taken in times.items()}
            results[kind] = {
                "file_megabytes": round(path.stat().st_size / 1e6, 1),
                "text_megabytes_per_second": {
                    reader: round(MEGABYTES * 1.048576 / median, 1) for reader, median in medians.items()
                },
                "ours_against": {
                    reader: paired_ratio(times["ours"], taken) for reader, taken in times.items() if reader != "ours"
                },
            }
    write_result("data_reading", {"versions": {"datasets": metadata.version("datasets")}, "formats": results})


if __name__ == "__main__":
    main()
