"""Train a language model of 0.2 M parameters under any layout; on emulated ranks or on processes, with the same result.

meshwright run --emulate 8 examples/layouts.py TEXT.txt "dp2 tp2 pp2"
python examples/layouts.py TEXT.txt "dp2 tp2 pp2"
"""

import sys

import meshwright as mw

RECIPE = {
    "run": {"directory": "runs/layouts"},
    "model": {"family": "llama", "layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "tied": True},
    "data": {"tokenizer": "bytes", "sequence": 64},
    "train": {"steps": 5, "batch": 8, "learning_rate": 1e-2, "log_every": 1},
}

if __name__ == "__main__":
    result = mw.train(RECIPE, {"data.source": sys.argv[1]}, layout=sys.argv[2], probe=False)
    if result.loss is not None:  # of the ranks, rank 0 has it
        print(f"step {result.step}: loss {result.loss!r}")
