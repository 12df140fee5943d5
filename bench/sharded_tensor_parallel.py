"""4 processes on two cores: our ZeRO-3 with tensor parallelism against `fully_shard` with `parallelize_module`.

The model, the step and the way of measuring are those of bench/tensor_parallel.py; the peer is split over one dimension
of a two-dimensional device mesh and sharded over the other, as torchtitan does it, in bf16 by its MixedPrecisionPolicy.

    python bench/sharded_tensor_parallel.py [--pairs 8] [--only zero3-tp2-fp32]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from tensor_parallel import Race, run

RACES = {
    "zero3-tp2-fp32": Race("dp2 zero3 tp2", "fp32"),
    "zero3-tp2-bf16": Race("dp2 zero3 tp2", "bf16"),
}

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run("sharded_tensor_parallel", RACES, "fully_shard with parallelize_module", __doc__)
