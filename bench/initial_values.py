"""Time in which a rank initialises its share of a layer of Llama 3 8B, by slices drawn from Philox, against drawing
whole tensors by torch's generator and keeping the slices, which gives values that do not depend on the layout either.

    python bench/initial_values.py [--rounds 5] [--threads 1]

Writes bench/results/initial_values.json. Rank 0 of each layout, float32 master weights, one process.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from functools import partial

import torch

from common import paired_ratio, write_result
from meshwright.layout import Layout
from meshwright.model.initialise import make_initial_slice
from meshwright.parallel.flat_buffers import make_flat_layout, make_slice_reader
from meshwright.spec.parameter_entries import ParameterEntry
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset

MODEL, UNIT = "llama-3-8b", "layers.0"
LAYOUTS = "dp1", "dp8 zero3", "tp8", "dp64 zero3", "dp64 tp8 zero1"


def draw_whole(entry: ParameterEntry) -> torch.Tensor:
    """Return a tensor's initial value, drawn whole by torch's CPU generator."""
    if entry.initial.kind != "normal":
        return torch.full(entry.shape, float(entry.initial.kind == "ones"))
    digest = hashlib.sha256(f"0:{entry.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    return torch.empty(entry.shape).normal_(std=entry.initial.std, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table, runs = parameter_table(preset(MODEL)), []
    for text in LAYOUTS:
        layout = Layout.parse(text)
        shards = layout.dp if layout.zero else 1
        flat = make_flat_layout(table, UNIT, shards, layout, layout.coordinates(0))
        shard = torch.zeros(flat.padded // shards)
        seconds: dict[str, list[float]] = {"slices": [], "whole tensors": []}
        for turn in range(options.rounds + 1):
            sources = partial(make_initial_slice, seed=0), make_slice_reader(draw_whole)
            for found, source in zip(seconds.values(), sources, strict=True):
                begun = time.perf_counter()
                flat.fill(shard, 0, source)
                if turn:  # the first turn warms up
                    found.append(time.perf_counter() - begun)
        run = {
            "layout": text,
            "elements": shard.numel(),
            **{
                f"{name.replace(' ', '_')}_seconds": round(statistics.median(found), 4)
                for name, found in seconds.items()
            },
            "ratio": paired_ratio(*seconds.values()),
        }
        runs.append(run)
        print(run, flush=True)
    write_result("initial_values", {"model": MODEL, "unit": UNIT, "threads": options.threads, "runs": runs})


if __name__ == "__main__":
    main()
