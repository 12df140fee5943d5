"""Train a language model of 0.1 M parameters on one text file, then continue for more steps; a recipe as a dictionary.

python examples/train.py TEXT.txt
"""

import sys

import meshwright as mw

RECIPE = {
    "layout": "dp1",
    "run": {"directory": "runs/example"},
    "model": {"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "tied": True},
    "data": {"tokenizer": "bytes", "sequence": 128},
    "train": {"steps": 10, "batch": 8, "learning_rate": 1e-2, "validate_every": 10},
}

if __name__ == "__main__":
    source = {"data.source": sys.argv[1]}
    result = mw.train(RECIPE, source)
    print(f"step {result.step}: loss {result.loss:.2f}, validation loss {result.validation_loss:.2f}")

    result = mw.train(RECIPE, {**source, "train.steps": 20}, layout="mb2")  # resumes, on another layout
    print(f"step {result.step}: loss {result.loss:.2f}, {result.checkpoint}")
