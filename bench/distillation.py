"""Distillation of a trained model: a student of two layers, with the teacher's distribution and on the text alone.

Run: `python bench/distillation.py --teacher DIRECTORY [--steps 120] [--seeds 3] [--variants "A;B"]`. The teacher is
stories260k (a Llama of five layers, trained on TinyStories), the text are stories that it samples at temperature 1. All
students have two layers of the teacher's width, the same initial values, data, steps and learning rate for a seed; they
differ in [distill]. Measured by transformers in float64 on stories that no student saw: the mean of
KL(teacher ‖ student) and the cross-entropy of the text, in nats per token. Writes `bench/results/distillation.json`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import write_result

VARIANTS: dict[str, dict[str, Any]] = {
    "text alone": {},
    "forward_kl": {"loss": "forward_kl", "mixing": 0.0},
    "forward_kl and hidden states": {"loss": "forward_kl", "mixing": 0.0, "hidden": True, "hidden_weight": 0.1},
    "forward_kl of 32 cached tokens": {"loss": "forward_kl", "mixing": 0.0, "top_k": 32},
    "jsd": {"loss": "jsd", "mixing": 0.0},
    "jsd, beta 0.1": {"loss": "jsd", "mixing": 0.0, "beta": 0.1},
    "jsd and half of the text": {"loss": "jsd", "mixing": 0.5},
}
SEQUENCE, STORIES, BATCH = 128, 400, 16


@torch.no_grad()
def sample_stories(model: Any, tokenizer: Any, count: int) -> list[str]:
    """Return stories that the teacher samples at temperature 1 from its start token."""
    torch.manual_seed(0)
    found: list[str] = []
    while len(found) < count:
        start = torch.full((200, 1), model.config.bos_token_id)
        rows = model.generate(start, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=159)
        found += [text for text in tokenizer.batch_decode(rows, skip_special_tokens=True) if text.strip()]
    return found[:count]


@torch.no_grad()
def measure(teacher: Any, directory: Path, texts: list[list[int]]) -> dict[str, float]:
    """Return means over the tokens of held-out texts: "kl", KL(teacher ‖ student); "jsd", their Jensen-Shannon
    divergence; "loss", the student's cross-entropy."""
    from transformers import LlamaForCausalLM

    student = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float64)
    found = {"kl": 0.0, "jsd": 0.0, "loss": 0.0}
    count = 0
    for ids in texts:
        tokens = torch.tensor([ids])
        log_p, log_q = (model(tokens).logits[0, :-1].log_softmax(-1) for model in (teacher, student))
        middle = torch.logaddexp(log_p, log_q) - math.log(2)
        found["kl"] += float((log_p.exp() * (log_p - log_q)).sum())
        found["jsd"] += float(sum((each.exp() * (each - middle)).sum() for each in (log_p, log_q))) / 2
        found["loss"] -= float(log_q.gather(1, tokens[0, 1:, None]).sum())
        count += len(ids) - 1
    return {name: value / count for name, value in found.items()}


def train(place: Path, teacher: str, distill: dict[str, Any], steps: int, seed: int) -> tuple[Path, float]:
    """Train a student; return its checkpoint and the median seconds of a step."""
    from meshwright.comm.mesh import Mesh
    from meshwright.data import prepare
    from meshwright.monitoring.run_directory import RunDirectory
    from meshwright.recipe import Recipe
    from meshwright.training import loop
    from meshwright.training.teacher_cache_writer import write_teacher_cache

    tables: dict[str, Any] = {
        "layout": "dp1 fp32",
        "run": {"seed": seed, "directory": str(place), "threads": 1},
        "model": {
            "family": "llama", "layers": 2, "hidden": 64, "heads": 8, "kv_heads": 4, "intermediate": 172, "tied": True,
            "vocabulary": 512,
        },
        "data": {
            "source": str(place.parent / "stories.jsonl"), "tokenizer": teacher, "sequence": SEQUENCE,
            "cache": str(place.parent / "cache"), "validation_fraction": 0.0,
        },
        "train": {"steps": steps, "batch": BATCH, "learning_rate": 3e-3, "warmup": 20, "weight_decay": 0.0},
    }  # fmt: skip
    if distill:
        tables["distill"] = {"teacher": teacher, **distill}
    recipe = Recipe.from_tables(tables)
    if distill.get("top_k"):
        write_teacher_cache(recipe, prepare(recipe.data, recipe.run.seed), lambda line: None)
    directory = RunDirectory(recipe.run_directory)
    with directory:
        result = loop.train(recipe, Mesh.single(recipe.parsed_layout), directory, show_progress=False)
    return Path(result["checkpoint"]), SEQUENCE * BATCH / result["tokens_per_second"]


def main() -> None:
    import json

    from transformers import AutoTokenizer, LlamaForCausalLM

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variants", default=";".join(VARIANTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.teacher)
    teacher = LlamaForCausalLM.from_pretrained(options.teacher, dtype=torch.float64)
    chosen = {name: VARIANTS[name] for name in options.variants.split(";")}
    keys = "kl", "jsd", "loss", "step_seconds"
    found: dict[str, dict[str, list[float]]] = {name: {key: [] for key in keys} for name in chosen}
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        stories = sample_stories(teacher.float(), tokenizer, STORIES)
        teacher = teacher.double()
        seen, unseen = stories[:-60], stories[-60:]
        (home / "stories.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in seen))
        start = tokenizer.bos_token_id
        texts = [[start, *tokenizer.encode(text, add_special_tokens=False)][:256] for text in unseen]
        for seed in range(options.seeds):
            for number, (name, distill) in enumerate(chosen.items()):
                place = home / f"{seed}-{number}"
                checkpoint, seconds = train(place, options.teacher, distill, options.steps, seed)
                values = measure(teacher, checkpoint, texts) | {"step_seconds": seconds}
                for key, value in values.items():
                    found[name][key].append(round(value, 5))
                shown = "  ".join(f"{key} {value:.4f}" for key, value in values.items())
                print(f"seed {seed}  {name:<30} {shown}", flush=True)
            report(found, {"steps": options.steps, "batch": BATCH, "sequence": SEQUENCE, "stories": len(seen)})


def report(found: dict[str, dict[str, list[float]]], settings: dict[str, Any]) -> None:
    """Print and write the results of the seeds so far."""
    alone = found["text alone"]["kl"]
    for name, values in found.items():
        values["kl_ratio"] = [round(mine / other, 4) for mine, other in zip(values["kl"], alone, strict=True)]
        print(f"{name:<30} KL {statistics.mean(values['kl']):.4f}, {max(values['kl_ratio']):.3f} of the text's or less")
    write_result("distillation", {"settings": {**settings, "seeds": len(alone)}, "variants": found}, quiet=True)


if __name__ == "__main__":
    main()
