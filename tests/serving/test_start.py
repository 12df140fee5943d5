"""What generates begins without what only compiling needs, and so does what trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_neither_generation_nor_training_loads_the_compiler(tiny_recipe: Path):
    """It takes over a second, in every rank, and nothing is compiled there."""
    program = (
        "import sys, torch, meshwright.serving.offline, meshwright.evaluation.evaluation\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "from meshwright.recipe import load_recipe\n"
        "from meshwright.training.worker import train_as_rank\n"
        "result = train_as_rank(load_recipe(sys.argv[1], sys.argv[2:]), show_progress=False)\n"
        "assert result['step'] == 4\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    text = "".join(f"Test {number} is good if it can fail.\n\n" for number in range(600))
    (tiny_recipe.parent / "corpus.txt").write_text(text)
    overrides = ["run.rendezvous=file:///nowhere", "data.source=corpus.txt", "data.cache=cache", "run.directory=run"]
    subprocess.run(
        [sys.executable, "-c", program, tiny_recipe.name, *overrides],
        cwd=tiny_recipe.parent,
        env=os.environ | {"RANK": "0", "WORLD_SIZE": "1"},
        check=True,
    )
