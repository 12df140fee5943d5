"""Time for which a background save blocks training, against a plain copy of the same state into existing memory.

The state is that of a 30 M-parameter model: float32 masters and both AdamW moments. Turns alternate; every save has
ended before the next is timed. The first save, which allocates, is reported apart.

    python bench/save_stall.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from common import paired_ratio, write_result
from meshwright.checkpoint import Checkpointer, SaveOptions
from peers import SHAPE
from synthetic import synthetic_trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(2)
    trainer = synthetic_trainer(SHAPE, "bf16", compile_blocks=False)
    pieces = trainer.slices(owned=True)
    copies = [torch.zeros_like(piece.tensor) for piece in pieces]
    plain: list[float] = []
    stalls: list[float] = []
    writing: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        checkpointer = Checkpointer(Path(directory), trainer.mesh, trainer.task.config, SaveOptions(keep=1))
        begun = time.perf_counter()
        checkpointer.save(0, pieces, trainer.state())
        first = checkpointer.stall_seconds
        checkpointer.wait()
        for number in range(1, rounds + 1):
            begun = time.perf_counter()
            for copy, piece in zip(copies, pieces, strict=True):
                copy.copy_(piece.tensor)
            plain.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            checkpointer.save(number, pieces, trainer.state())
            stalls.append(checkpointer.stall_seconds)
            checkpointer.wait()
            writing.append(time.perf_counter() - begun)
            assert checkpointer.failed() is None
    write_result(
        "save_stall",
        {
            "state_mib": round(sum(piece.tensor.nbytes for piece in pieces) / 2**20, 1),
            "plain_copy_seconds": round(statistics.median(plain), 4),
            "stall_seconds": round(statistics.median(stalls), 4),
            "first_stall_seconds": round(first, 4),
            "whole_save_seconds": round(statistics.median(writing), 4),
            "stall_to_plain_copy": paired_ratio(plain, stalls),
        },
    )


if __name__ == "__main__":
    main()
