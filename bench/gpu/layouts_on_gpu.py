"""Layouts on one GPU: ranks that share it over gloo, and one NCCL rank that makes every call; against one CPU.

    python bench/gpu/layouts_on_gpu.py [--device cuda] [--only tp2]

Every axis and pairs of them, eager and compiled: three steps of plain SGD in float32 on rows of several documents; the
losses, the gradient norms and every parameter's update must be those of one CPU process in float32 up to 1e-4. Under
NCCL one rank makes the calls of ZeRO, tensor, sequence and context parallelism that a group of one would skip. Then
seconds of a step and peak memory of a larger model in bf16 with AdamW, for layouts of two ranks. `--device cpu` runs
the checks on the CPU and measures nothing. Each case fails alone. Writes `bench/results/gpu_layouts.json` on CUDA; exit
code 1 when one does not hold.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
from cases import Cases, step_seconds

from meshwright.comm.backend import get_group_backends
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.data import TokenBatch
from meshwright.layout import Layout
from meshwright.recipe import Recipe
from meshwright.spec.config_from_recipe import config_from_recipe
from meshwright.training.language_model import LanguageModelTask
from meshwright.training.trainer import Trainer
from synthetic import InTurn

SEQUENCE, BATCH, STEPS = 64, 8, 3
TOLERANCE = 1e-4
DENSE = {"preset": "llama-tiny", "layers": 4}
MIXTURE = {"preset": "qwen3-moe-tiny", "layers": 2, "experts": 4, "experts_per_token": 2}
LARGE = {"preset": "llama-3-8b", "layers": 8, "hidden": 2048, "heads": 16, "kv_heads": 16, "intermediate": 5632}
LARGE |= {"vocabulary": 32000}
LARGE_SEQUENCE, LARGE_BATCH = 2048, 4

CHECKED = {
    "dense": (
        *("dp2", "dp2 zero1 mb2", "dp2 zero2 mb2", "dp2 zero3", "tp2", "tp2:nosp", "tp2 ac:selective", "cp2"),
        *("cp2:ulysses", "cp2 ac:full", "pp2 mb4", "pp2:gpipe mb4", "pp2:interleaved mb4", "pp2:zb-v mb4"),
        *("pp2:dualpipe mb4", "dp2 zero3 tp2", "tp2 cp2", "dp2 zero1 pp2 mb2", "tp2 pp2:zb-h1 mb4", "cp2 pp2 mb4"),
        "dp4 zero3 hs2",
    ),
    "mixture": ("dp2 ep2", "tp2 ep2", "cp2 ep2", "dp2 zero3 ep2", "dp2 tp2 ep2:etp2", "dp2 pp2 mb2 ep2"),
}
ONE_RANK = ("mb2", "zero1 mb2", "zero2 mb2", "zero3 mb2", "zero3 mb2 ac:full", "tp1:nosp mb2")
COMPILED = ("tp2", "dp2 zero3", "cp2", "pp2 mb4")
MEASURED = ("dp2", "dp2 zero3", "tp2", "cp2", "pp2 mb4", "pp2:zb-v mb4")


class NumberedData:
    """Tokens, targets and documents of each sample, made from its number: the same for every layout."""

    vocabulary, sha256, sequences, rows = 256, "numbered", 1 << 20, 1 << 20

    def __init__(self, sequence: int) -> None:
        self.sequence, self.tokens = sequence, self.sequences * sequence

    def split(self, name: str) -> NumberedData:
        return self

    def make_sample_order(self) -> InTurn:
        return InTurn()

    def read_batch(self, samples: np.ndarray, padded: bool = False) -> TokenBatch:
        tokens, ids = [], []
        for sample in samples:
            random = np.random.default_rng([7, int(sample)])
            tokens.append(random.integers(0, self.vocabulary, self.sequence + 1))
            ids.append((random.random(self.sequence) < 3 / self.sequence).cumsum())
        rows = np.stack(tokens)
        targets = np.where(np.diff(np.stack(ids), axis=1, append=-1) == 0, rows[:, 1:], -100)
        return TokenBatch(tokens=rows[:, :-1].copy(), targets=targets, document_ids=np.stack(ids).astype(np.int32))


def trainer(
    model: dict[str, Any],
    layout: Layout,
    device: str,
    sequence: int,
    batch: int,
    trivial_calls: bool = False,
    **train: Any,
) -> Trainer:
    """A trainer ready to step on this rank's part of the layout."""
    recipe = Recipe.from_tables(
        {
            "layout": str(layout),
            "model": model,
            "data": {"source": "stdlib", "tokenizer": "bytes", "sequence": sequence},
            "train": {"steps": 1000, "batch": batch, "compile": False, **train},
        }
    )
    data: Any = NumberedData(sequence)
    config = config_from_recipe(recipe.model, sequence, model.get("vocabulary", data.vocabulary))
    precise = layout if layout.precision else layout.with_(precision="fp32")
    mesh = Mesh.create(layout, device)
    mesh.communicator.trivial_calls = trivial_calls
    return Trainer(LanguageModelTask(recipe, precise, config, data, mesh))


Answer = dict[str, Any]
# Large enough for updates far above the rounding of weights near 1.
SGD: dict[str, Any] = {
    "optimizer": "sgd",
    "learning_rate": 2.0,
    "warmup": 0,
    "schedule": "constant",
    "weight_decay": 0.0,
    "clip": 0.0,
}


def check(model: dict[str, Any], layout_text: str, device: str, compiled: bool, trivial_calls: bool = False) -> Answer:
    """On one rank: losses and norms of three steps, and the slices of all parameters' updates that it holds."""
    device = place(device)
    found = trainer(model, Layout.parse(layout_text), device, SEQUENCE, BATCH, trivial_calls, **SGD, compile=compiled)
    before = [piece.tensor.clone() for piece in found.parallel.master_slices(owned=True)]
    verdicts = [found.step() for _ in range(STEPS)]
    pieces = found.parallel.master_slices(owned=True)
    updates: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for piece, old in zip(pieces, before, strict=True):
        # Position of the slice in the parameter: its element indices, sharded like the parameter.
        numbers = piece.select(torch.arange(found.task.table.entry(piece.name).numel))
        updates.setdefault(piece.name, []).append((numbers, (piece.tensor - old).double().cpu()))
    found.mesh.close()
    return {
        "losses": [verdict.loss for verdict in verdicts],
        "norms": [verdict.gradient_norm for verdict in verdicts],
        "updates": updates,
    }


def whole(answers: list[Answer]) -> dict[str, torch.Tensor]:
    """The updates of all entries, put together from what the ranks own; what nobody owns is not a number."""
    entries: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for answer in answers:
        for name, parts in answer["updates"].items():
            entries.setdefault(name, []).extend(parts)
    together = {}
    for name, parts in entries.items():
        values = torch.full((1 + max(int(at.max()) for at, _ in parts),), torch.nan, dtype=torch.float64)
        for at, part in parts:
            values[at] = part
        together[name] = values
    return together


def error(answers: list[Answer], alone: Answer) -> float:
    """The largest relative difference of a loss, a norm or an entry's update; tiny updates are held to the mean one."""
    truth, found = whole([alone]), whole(answers)
    if truth.keys() != found.keys():
        return float("inf")
    count = sum(entry.numel() for entry in truth.values())
    mean = (sum(float(entry.square().sum()) for entry in truth.values()) / count) ** 0.5
    errors = [abs(a / b - 1) for key in ("losses", "norms") for a, b in zip(answers[0][key], alone[key], strict=True)]
    for name, entry in truth.items():
        if found[name].shape != entry.shape:
            return float("inf")
        scale = max(float(entry.norm()), 1e-3 * mean * entry.numel() ** 0.5)
        errors.append(float((found[name] - entry).norm()) / scale)
    return float("inf") if any(e != e for e in errors) else max(errors)


def measure(layout_text: str, device: str) -> dict[str, float]:
    """On one rank: the median seconds of a step of the large model, and the rank's peak memory."""
    device = place(device)
    found = trainer(LARGE, Layout.parse(f"{layout_text} bf16"), device, LARGE_SEQUENCE, LARGE_BATCH, learning_rate=1e-4)
    seconds = step_seconds(found.step, 2, 5, True)
    found.mesh.close()
    return {"step_seconds": seconds, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def place(device: str) -> str:
    """The device of this rank: gloo's ranks share the first GPU."""
    if device == "cpu":
        return device
    torch.cuda.set_device(0)
    return "cuda:0"


SPLIT: list[bool] = []
"""True for each process of one NCCL rank that could split a group off its world."""

Case = tuple[dict[str, Any], str, bool]  # model, layout, compiled
Checked = list[Answer] | str
"""The answers of a case by rank, or what went wrong."""


def one_rank(rank: int, directory: str, device: str, cases: list[Case]) -> None:
    """One process whose group of one rank makes every call that groups of several make (NCCL; gloo on the CPU)."""
    bound: dict[str, Any] = {} if device == "cpu" else {"device_id": torch.device(place(device))}
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{directory}/store", rank=0, world_size=1, **bound)
    if device != "cpu":
        torch.save(sum_over_split_group(), f"{directory}/split.pt")
    found: list[Checked] = []
    for model, layout, compiled in cases:
        try:
            found.append([check(model, layout, device, compiled, trivial_calls=True)])
        except Exception as failure:
            found.append(f"{type(failure).__name__}: {failure}"[-500:])
        torch.save(found, f"{directory}/answers.pt")
    dist.destroy_process_group()


def sum_over_split_group() -> bool:
    """Return True if a group that is split off the world, as the groups of axes are, has only the backend NCCL and sums
    over its ranks."""
    try:
        group: Any = dist.split_group(None, [[0]], timedelta(seconds=60), backend="nccl")
    except (TypeError, RuntimeError, ValueError) as failure:  # before torch 2.13 it takes no backend
        print(failure, file=sys.stderr)
        return False
    one = torch.ones(4, device="cuda")
    dist.all_reduce(one, group=group)
    held = get_group_backends(group) == {"cuda": "nccl"} and bool((one == 1).all())
    dist.destroy_process_group(group)
    return held


def by_one_rank(device: str, cases: list[Case]) -> list[Checked]:
    """The answers of one rank, case by case; where the process itself ended, of the cases before."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            spawn(one_rank, (directory, device, cases), nprocs=1)
        except Exception as failure:
            print(failure, file=sys.stderr)
        found: list[Checked] = torch.load(f"{directory}/answers.pt")
        split = Path(directory, "split.pt")
        SPLIT.extend([torch.load(split)] if split.exists() else [])
    return [*found, *["the process ended"] * (len(cases) - len(found))]


def _first(answers: Callable[[], list[Any]]) -> Any:
    """The first rank's answer."""
    return answers()[0]


def _identity(answers: Checked) -> Checked:
    return answers


def error_of(answers: Checked, alone: Answer) -> float:
    """The error of a case, by `error`. Raises RuntimeError for a case that failed."""
    if isinstance(answers, str):
        raise RuntimeError(answers)
    return error(answers, alone)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument(
        "--only", default="", help="run only layouts whose notation contains this text; write no results"
    )
    parser.add_argument("--seconds", type=float, default=540.0, help="start no case after this many seconds")
    options = parser.parse_args()
    cuda, models = options.device == "cuda", {"dense": DENSE, "mixture": MIXTURE}
    header = {"gpu": torch.cuda.get_device_name() if cuda else "cpu", "tolerance": TOLERANCE}
    cases = Cases("gpu_layouts" if cuda and not options.only else None, header, options.seconds)
    with LocalRanks(1, timeout=300) as ranks:
        alone = {
            name: ranks.run("layouts_on_gpu:check", model, "dp1", "cpu", False)[0] for name, model in models.items()
        }

    def judge(section: str, name: str, layout: str, compiled: bool, answer: Callable[[], Checked]) -> None:
        title = f"{name} {layout}{' compiled' * compiled}"
        cases.run(section, title, lambda: error_of(answer(), alone[name]), lambda found: found < TOLERANCE)

    single = [
        (name, layout, compiled)
        for name, layout, compiled in itertools.product(models, ONE_RANK, (False, True))
        if options.only in layout
    ]
    answers = by_one_rank(options.device, [(models[name], layout, compiled) for name, layout, compiled in single])
    if cuda:
        cases.run("one rank makes every call", "a group is split off the world", lambda: SPLIT == [True], bool)
    for each, answer in zip(single, answers, strict=True):
        judge("one rank makes every call", *each, partial(_identity, answer))
    chosen = [(name, layout, False) for name, layouts in CHECKED.items() for layout in layouts]
    chosen += [("dense", layout, True) for layout in COMPILED]
    chosen = [case for case in chosen if options.only in case[1]]
    for size in sorted({Layout.parse(layout).world_size for _, layout, _ in chosen}):
        with LocalRanks(size, timeout=120) as ranks:
            for name, layout, compiled in chosen:
                if Layout.parse(layout).world_size == size:
                    shared = partial(ranks.run, "layouts_on_gpu:check", models[name], layout, options.device, compiled)
                    judge("ranks share the GPU", name, layout, compiled, shared)
            if size == 2 and cuda:
                for layout in MEASURED:
                    measured = partial(ranks.run, "layouts_on_gpu:measure", layout, "cuda")
                    cases.run("measured", layout, partial(_first, measured))
    return cases.end()


if __name__ == "__main__":
    raise SystemExit(main())
