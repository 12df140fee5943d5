"""Peak memory of a process that trains fully, with LoRA and with QLoRA, predicted before the first step and measured.

Runs `meshwright train` on a Llama of 23 million parameters in fp32, each in a separate process; both figures are
those of the run's `result.json`: the highest resident set of the process, framework included. The allocator's peak is
compared in `tests/planner/memory/test_ledger.py`.

Run: `python bench/adapter_memory.py`. Writes `bench/results/adapter_memory.json`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import write_result

SHAPE = {"layers": 10, "hidden": 448, "heads": 8, "kv_heads": 4, "intermediate": 1216}
ADAPTERS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter": {"kind": "lora", "rank": 16}},
    "qlora": {"adapter": {"kind": "lora", "rank": 16, "base": "nf4"}},
}
LIMIT = 0.10


def tables_of(place: Path) -> dict[str, Any]:
    """Return the tables of a recipe that all runs share."""
    data = {"source": str(place / "text.txt"), "tokenizer": "bytes", "sequence": 512, "cache": str(place / "cache")}
    return {"data": data, "train": {"steps": 4, "batch": 4, "learning_rate": 1e-4}}


def write_base(place: Path) -> None:
    """Write a base model with random weights."""
    import torch

    from meshwright.checkpoint.model_directory import save_huggingface
    from meshwright.model.initialise import initialise
    from meshwright.model.transformer import Transformer
    from meshwright.recipe import Recipe
    from meshwright.spec.config_from_recipe import config_from_recipe
    from meshwright.spec.parameters import parameter_table

    recipe = Recipe.from_tables(tables_of(place) | {"model": {"family": "llama", **SHAPE}})
    config = config_from_recipe(recipe.model, 512, 257)
    model = Transformer(config, dtype=torch.float32)
    initialise(model, parameter_table(config), seed=1)
    save_huggingface(model, place / "base")


def run(name: str, place: Path) -> dict[str, Any]:
    """Train in a separate process; return the peaks in bytes."""
    from meshwright.toml import format_toml

    adapter = ADAPTERS[name]
    model = {"from": str(place / "base"), **({} if adapter else {"load_weights": True})}
    own = {"layout": "dp1 fp32", "run": {"directory": str(place / name), "name": name}, "model": model}
    tables = own | tables_of(place) | adapter
    (place / f"{name}.toml").write_text(format_toml(tables))
    command = [sys.executable, "-m", "meshwright", "train", str(place / f"{name}.toml")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stderr}")
    result = json.loads((place / name / "result.json").read_text())
    predicted, measured = (result[which]["memory_bytes"] for which in ("predicted", "measured"))
    said, seen = predicted["process_peak"], measured["process_peak"]
    found = {"predicted_process_peak": said, "measured_process_peak": seen, "error": round(said / seen - 1, 4)}
    return found | {"predicted_allocator_peak": predicted["allocator_peak"]}


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        (place / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20_000)
        write_base(place)
        rows = {name: run(name, place) for name in ADAPTERS}
    within = all(abs(row["error"]) <= LIMIT for row in rows.values())
    write_result("adapter_memory", {"shape": SHAPE, "rank": 16, "runs": rows, "limit": LIMIT, "within_limit": within})


if __name__ == "__main__":
    main()
