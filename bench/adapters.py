"""LoRA and QLoRA against peft with the transformers Trainer, and the cost of an adapter, one process each, two threads.

Run: `python bench/adapters.py [--rounds 7]` (needs peft, accelerate and bitsandbytes). The data are those of
`bench/fine_tuning.py`: all contenders train adapters of rank 16 on all linear layers of the same bf16 base, on the same
tokens, and only tokens that are no padding are counted. Contenders stay alive and take turns; ratios are of rates
measured in the same round. `overhead` compares forward and backward with the adapter and of the frozen base alone,
whose input has a gradient, alternating in one process. Writes `bench/results/adapters.json`.

- meshwright-lora, meshwright-qlora: `data.pack`, as `meshwright train` runs it
- peft-lora, peft-qlora: Trainer, batches padded to their longest example; NF4 by bitsandbytes
- peft-lora-flattened, peft-qlora-flattened: Trainer, all examples of a batch in one row
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import fine_tuning
from common import Contender, paired_ratio, write_result

# bitsandbytes and transformers import a package `kernels`, which `bench/kernels.py` would hide.
sys.path[:] = [each for each in sys.path if Path(each).resolve() != Path(__file__).resolve().parent]

OURS = ("meshwright-lora", "meshwright-qlora")
PEERS = ("peft-lora", "peft-lora-flattened", "peft-qlora", "peft-qlora-flattened")
SHAPE = {"layers": 4, "hidden": 768, "heads": 12, "kv_heads": 4, "intermediate": 2048}
RANK, ROWS = 16, 2


def with_adapter(recipe: Any, place: Path, packed: bool) -> Any:
    """Return a recipe that trains an adapter on the base model."""
    from meshwright.recipe import Recipe

    tables = recipe.to_tables()
    tables["model"] = {"from": str(place / "base")}
    tables["data"]["tokenizer"] = str(place / "base")
    tables["data"].pop("vocabulary", None)
    tables["adapter"] = {"kind": "lora", "rank": RANK, "base": "nf4" if packed else "bf16"}
    return Recipe.from_tables(tables)


def write_base(place: Path) -> dict[str, Any]:
    """Write the data, and a base model with random weights and the data's tokenizer; return a description."""
    import torch

    from meshwright.checkpoint.model_directory import save_huggingface
    from meshwright.data import prepare
    from meshwright.model.initialise import initialise
    from meshwright.model.transformer import Transformer
    from meshwright.spec.parameters import parameter_table
    from meshwright.training.model_config import resolve_model_config

    described = fine_tuning.write_examples(place)
    recipe = fine_tuning.recipe(place, False)
    data = prepare(recipe.data, 0)
    config = resolve_model_config(recipe, data)
    model = Transformer(config, dtype=torch.bfloat16)
    initialise(model, parameter_table(config), seed=1)
    save_huggingface(model, place / "base")
    for file in Path(data.tokenizer_directory).iterdir():
        shutil.copy(file, place / "base")
    return described | {"parameters": parameter_table(config).numel}


def adapt_with_peft(place: Path, packed: bool) -> Any:
    """Return the base model with an adapter of peft."""
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    if packed:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
        options["device_map"] = "cpu"
    model = AutoModelForCausalLM.from_pretrained(place / "base", **options)
    if packed:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def measure_overhead(rounds: int, place: Path) -> dict[str, Any]:
    """Return the ratio of seconds of forward and backward with an adapter to those of the frozen base."""
    import torch

    from meshwright.adapters.attach import attach_adapters
    from meshwright.model.initialise import initialise
    from meshwright.model.transformer import Transformer
    from meshwright.spec.adapter_config import AdapterConfig
    from meshwright.spec.config_json import config_from_path
    from meshwright.spec.parameters import parameter_table

    config = config_from_path(place / "base")
    tokens = torch.randint(0, config.vocabulary, (ROWS, fine_tuning.SEQUENCE + 1))
    models = []
    for adapter in (None, AdapterConfig("lora", RANK, 2.0 * RANK)):
        changed = dataclasses.replace(config, adapter=adapter)
        model = Transformer(changed, dtype=torch.bfloat16)
        attach_adapters(model, parameter_table(changed), dtype=torch.bfloat16)
        initialise(model, parameter_table(changed), seed=1)
        model.requires_grad_(False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".adapter." in name or (adapter is None and name == "embedding.weight"))
        models.append(model)
    seconds: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for model, found in zip(models, seconds, strict=True):
            begun = time.perf_counter()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            if number:
                found.append(time.perf_counter() - begun)
            model.zero_grad()
    return {"seconds_ratio": paired_ratio(seconds[0], seconds[1]), "rounds": rounds}


def race(options: argparse.Namespace, place: Path) -> None:
    """Let the contenders take turns and write the result."""
    data, script = write_base(place), str(Path(__file__))
    racers = {name: Contender(name, [sys.executable, script, name, str(place)]) for name in options.contenders}
    seconds: dict[str, list[float]] = {name: [] for name in racers}
    answers: dict[str, dict[str, Any]] = {}
    for _ in range(options.rounds):
        for name, racer in racers.items():
            answer = answers[name] = racer.run(options.steps)
            seconds[name].append(sum(answer["seconds"]) / sum(answer["tokens"][-len(answer["seconds"]) :]))
    for racer in racers.values():
        racer.close()
    contenders = {
        name: {
            "tokens_per_second": round(1 / statistics.median(some), 1),
            "peak_mib": round(answers[name]["peak_bytes"] / 2**20),
            "tokens_per_second_by_round": [round(1 / value, 1) for value in some],
        }
        for name, some in seconds.items()
    }
    pairs = [(ours, theirs) for ours in OURS for theirs in PEERS if theirs.startswith(f"peft-{ours.split('-')[1]}")]
    ratios = {
        f"{ours} to {theirs}": paired_ratio(seconds[ours], seconds[theirs])
        for ours, theirs in pairs
        if ours in racers and theirs in racers
    }
    write_result(
        "adapters",
        {
            "shape": SHAPE, "rank": RANK, "data": data, "precision": "bf16", "threads": 2, "contenders": contenders,
            "speed_ratio_to": ratios, "overhead": measure_overhead(max(5, options.rounds), place),
        },
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=(*OURS, *PEERS), help=argparse.SUPPRESS)
    parser.add_argument("place", nargs="?", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="steps per round")
    parser.add_argument("--contenders", nargs="+", default=(*OURS, *PEERS), choices=(*OURS, *PEERS))
    options = parser.parse_args()
    fine_tuning.SHAPE, fine_tuning.ROWS, fine_tuning.WARM_STEPS = SHAPE, ROWS, 1
    import torch

    torch.set_num_threads(2)
    if options.name is None:
        with tempfile.TemporaryDirectory() as place:
            race(options, Path(place))
    elif options.name in OURS:
        plain = fine_tuning.recipe
        fine_tuning.recipe = lambda place, compiled: with_adapter(plain(place, compiled), place, "q" in options.name)
        fine_tuning.meshwright(options.place, False)
    else:
        packed = "qlora" in options.name
        kind = "trainer-flattened" if "flattened" in options.name else "trainer"
        fine_tuning.trainer(options.place, kind, lambda _: adapt_with_peft(options.place, packed))


if __name__ == "__main__":
    main()
