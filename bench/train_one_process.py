"""One process, two threads, a 30 M-parameter Llama shape: ours against the transformers Trainer and a compiled loop.

Run: `python bench/train_one_process.py [--rounds 9]`. All contenders stay alive and take turns; ratios are of times
taken in the same round. bf16 for all (the fastest precision of each). Writes `bench/results/train_one_process.json`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from common import Contender, paired_ratio, write_result
from peers import SHAPE

CONTENDERS = ("meshwright", "plain", "trainer", "trainer-compiled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="steps per round")
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS)
    options = parser.parse_args()
    script = str(Path(__file__).parent / "contenders.py")
    racers = {name: Contender(name, [sys.executable, script, name]) for name in options.contenders}
    times: dict[str, list[float]] = {name: [] for name in racers}
    answers: dict[str, dict] = {}
    for _ in range(options.rounds):
        for name, racer in racers.items():
            answers[name] = racer.run(options.steps)
            times[name].append(statistics.mean(answers[name]["seconds"]))
    for racer in racers.values():
        racer.close()

    import torch

    from meshwright.probe.matmul import measure_matmul_rate
    from meshwright.spec.config_from_recipe import config_from_recipe
    from meshwright.spec.flops import FLOPS_CONVENTION, training_flops_per_token
    from meshwright.spec.parameters import parameter_table
    from synthetic import synthetic_recipe

    torch.set_num_threads(2)
    config = config_from_recipe(synthetic_recipe(SHAPE, "bf16", False).model, SHAPE["sequence"], SHAPE["vocabulary"])
    flops, peak = (
        training_flops_per_token(config, SHAPE["sequence"]),
        measure_matmul_rate(torch.bfloat16, "cpu", 2.0),
    )
    tokens = SHAPE["batch"] * SHAPE["sequence"]
    write_result(
        "train_one_process",
        {
            "shape": {**SHAPE, "parameters": parameter_table(config).numel},
            "precision": "bf16",
            "threads": 2,
            "measured_matmul_gflops": round(peak / 1e9, 1),
            "flops_convention": FLOPS_CONVENTION,
            "contenders": {
                name: {
                    "tokens_per_second": round(tokens / statistics.median(some), 1),
                    "share_of_matmul_rate": round(tokens / statistics.median(some) * flops / peak, 4),
                    "peak_mib": round(answers[name]["peak_bytes"] / 2**20),
                    "seconds_a_step": [round(value, 4) for value in some],
                    **{key: answers[name][key] for key in ("loss", "seconds_by_part") if key in answers[name]},
                }
                for name, some in times.items()
            },
            "speed_ratio_meshwright_to": {
                name: paired_ratio(times["meshwright"], some) for name, some in times.items() if name != "meshwright"
            },
        },
    )


if __name__ == "__main__":
    main()
