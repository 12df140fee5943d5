"""Supervised fine-tuning, one process, two threads: tokens per second of ours and of the transformers Trainer.

Run: `python bench/fine_tuning.py [--rounds 9]`. The data are functions of this Python's standard library: the question
is the source of one without its docstring, the answer is the docstring. All train the same Llama on the same tokens in
bf16, about as many examples a step, and only tokens that are no padding are counted. Contenders stay alive and take
turns; ratios are of rates measured in the same round. Writes `bench/results/fine_tuning.json`.

- meshwright: `data.pack`, as `meshwright train` runs it; meshwright-compiled: with `train.compile`
- trainer: batches padded to their longest example (DataCollatorForSeq2Seq)
- trainer-by-length: the same, examples of like length together
- trainer-flattened: all examples of a batch in one row (DataCollatorWithFlattening)
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import Contender, paired_ratio, peak_resident_bytes, serve_turns, write_result

CONTENDERS = ("meshwright", "meshwright-compiled", "trainer", "trainer-by-length", "trainer-flattened")
SHAPE = {"layers": 6, "hidden": 256, "heads": 4, "kv_heads": 4, "intermediate": 704}
VOCABULARY, SEQUENCE, ROWS = 4096, 511, 4
MODULES = ("ast", "argparse", "asyncio/tasks", "base64", "calendar", "collections/__init__", "concurrent/futures/_base")
MODULES += ("configparser", "csv", "datetime", "decimal", "difflib", "email/message", "enum", "fractions", "functools")
MODULES += (
    "heapq",
    "imaplib",
    "inspect",
    "ipaddress",
    "logging/__init__",
    "mailbox",
    "pathlib",
    "pickletools",
    "random",
)
MODULES += ("shutil", "smtplib", "socket", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap")
MODULES += ("threading", "typing", "unittest/mock", "urllib/parse", "urllib/request", "uuid", "zipfile")
WARM_STEPS = 3


def records() -> list[dict[str, str]]:
    """One record for each function with a docstring."""
    found = []
    for module in MODULES:
        path = Path(sysconfig.get_path("stdlib"), f"{module}.py")
        if not path.exists():  # other Python versions format some differently
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)) and len(node.body) > 1:
                node.body = node.body[1:]
                found.append(
                    {
                        "instruction": f"Write the docstring of {node.name}.",
                        "input": ast.unparse(node)[:1200],
                        "output": docstring,
                    }
                )
    return found


def recipe(place: Path, compiled: bool) -> Any:
    from meshwright.recipe import Recipe

    return Recipe.from_tables(
        {
            "layout": "dp1 bf16",
            "model": {"family": "llama", "tied": True, **SHAPE},
            "data": {
                "source": str(place / "records.jsonl"),
                "records": "instruction",
                "tokenizer": "bpe",
                "vocabulary": VOCABULARY,
                "sequence": SEQUENCE,
                "validation_fraction": 0.0,
                "cache": str(place / "cache"),
            },
            "train": {"steps": 10**6, "batch": ROWS, "learning_rate": 1e-3, "compile": compiled},
        }
    )


def meshwright(place: Path, compiled: bool) -> None:
    """Our own trainer, the whole step as `meshwright train` runs it, reading of rows included."""
    import numpy as np

    from meshwright.comm.mesh import Mesh
    from meshwright.data import prepare
    from meshwright.monitoring.memory import keep_freed_memory
    from meshwright.training.language_model import LanguageModelTask
    from meshwright.training.model_config import resolve_model_config
    from meshwright.training.trainer import Trainer

    keep_freed_memory()  # as in every rank of `meshwright train`
    wanted = recipe(place, compiled)
    data = prepare(wanted.data, 0)
    trainer = Trainer(
        LanguageModelTask(
            wanted, wanted.parsed_layout, resolve_model_config(wanted, data), data, Mesh.single(wanted.parsed_layout)
        )
    )
    plan, read = trainer.task.tokens.plan, trainer.task.tokens.read_batch
    tokens: list[int] = []

    def counted(numbers: Any, **options: Any) -> Any:
        sizes = [plan.kept[plan.order[plan.bounds[row] : plan.bounds[row + 1]]].sum() for row in np.asarray(numbers)]
        tokens.append(int(sum(sizes)))
        return read(numbers, **options)

    trainer.task.tokens.read_batch = counted
    serve_turns(
        trainer.step,
        lambda: {"tokens": tokens, "peak_bytes": peak_resident_bytes(), **trainer.clock.seconds()},
        WARM_STEPS,
    )


def trainer(place: Path, kind: str, build: Callable[[Any], Any] | None = None) -> None:
    """The transformers Trainer: bf16 autocast, SDPA, fused AdamW; steps are counted between its own callbacks. build:
    function (config) -> model; None: a Llama with random weights."""
    import os
    import time

    import torch
    from transformers import (
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        DataCollatorWithFlattening,
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    torch.manual_seed(0)
    given = json.loads((place / "examples.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(given["tokenizer"])
    tokenizer.pad_token = tokenizer.eos_token
    config = LlamaConfig(
        vocab_size=given["vocabulary"],
        hidden_size=SHAPE["hidden"],
        num_hidden_layers=SHAPE["layers"],
        num_attention_heads=SHAPE["heads"],
        num_key_value_heads=SHAPE["kv_heads"],
        intermediate_size=SHAPE["intermediate"],
        max_position_embeddings=SEQUENCE + 1,
        tie_word_embeddings=True,
    )
    model = build(config) if build else LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    flattened = kind == "trainer-flattened"
    collate = DataCollatorWithFlattening() if flattened else DataCollatorForSeq2Seq(tokenizer, padding=True)
    tokens: list[int] = []

    def counted(examples: list[dict[str, Any]]) -> Any:
        tokens.append(sum(len(example["input_ids"]) for example in examples))
        return collate(examples)

    class Turns(TrainerCallback):
        """Waits for its turn before a step and answers after the last of the turn."""

        def __init__(self) -> None:
            self.left, self.seconds, self.begun, self.done = WARM_STEPS, [], 0.0, 0

        def on_step_begin(self, *arguments: Any, **named: Any) -> None:
            if self.left == 0:
                line = sys.stdin.readline()
                if not line:
                    os._exit(0)
                self.left, self.seconds = json.loads(line)["run"], []
            self.begun = time.perf_counter()

        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            self.seconds.append(time.perf_counter() - self.begun)
            self.left, self.done = self.left - 1, self.done + 1
            if self.left == 0:
                answer = {"seconds": self.seconds, "tokens": tokens[: self.done], "peak_bytes": peak_resident_bytes()}
                print(json.dumps(answer), flush=True)

    examples = [{"input_ids": ids, "labels": labels} for ids, labels in given["examples"]]
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            per_device_train_batch_size=given["batch"],
            max_steps=10**6,
            bf16=True,
            use_cpu=True,
            optim="adamw_torch_fused",
            learning_rate=1e-3,
            weight_decay=0.1,
            max_grad_norm=1.0,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            **({"train_sampling_strategy": "group_by_length"} if kind == "trainer-by-length" else {}),
        )
        Trainer(model, arguments, train_dataset=examples, data_collator=counted, callbacks=[Turns()]).train()


def write_examples(place: Path) -> dict[str, Any]:
    """Prepare the data, and write the very tokens that our rows hold for the Trainer."""
    import numpy as np

    from meshwright.data import prepare

    (place / "records.jsonl").write_text("\n".join(map(json.dumps, records())))
    data = prepare(recipe(place, False).data, 0, print)
    split = data.split("train")
    plan = split.plan
    examples = []
    for number, kept in zip(plan.numbers.tolist(), plan.kept[:, 0].tolist(), strict=True):
        begin = int(split._documents[number, 0])
        tokens, trained = split._read_document(begin, begin + kept)
        examples.append((tokens.tolist(), np.where(trained, tokens.astype(np.int64), -100).tolist()))
    batch = round(ROWS * len(examples) / split.sequences)
    lengths = sorted(len(tokens) for tokens, _ in examples)
    written = {"examples": examples, "batch": batch, "vocabulary": data.vocabulary}
    (place / "examples.json").write_text(json.dumps({**written, "tokenizer": str(data.tokenizer_directory)}))
    return {
        "examples": len(examples),
        "examples_a_step": batch,
        "tokens_of_an_example": {"median": lengths[len(lengths) // 2], "longest": lengths[-1], "shortest": lengths[0]},
        "rows": split.sequences,
        "row_tokens": SEQUENCE + 1,
        "filled": round(1 - split.report["padding"] / split.sequences / (SEQUENCE + 1), 4),
        "response_tokens": split.report["targets"],
        "vocabulary": data.vocabulary,
    }


def race(options: argparse.Namespace, place: Path) -> None:
    data = write_examples(place)
    script = str(Path(__file__))
    racers = {name: Contender(name, [sys.executable, script, name, str(place)]) for name in options.contenders}
    seconds_a_token: dict[str, list[float]] = {name: [] for name in racers}
    answers: dict[str, dict[str, Any]] = {}
    for _ in range(options.rounds):
        for name, racer in racers.items():
            answer = answers[name] = racer.run(options.steps)
            tokens = sum(answer["tokens"][-len(answer["seconds"]) :])
            seconds_a_token[name].append(sum(answer["seconds"]) / tokens)
    for racer in racers.values():
        racer.close()
    write_result(
        "fine_tuning",
        {
            "shape": SHAPE,
            "data": data,
            "precision": "bf16",
            "threads": 2,
            "contenders": {
                name: {
                    "tokens_per_second": round(1 / statistics.median(some), 1),
                    "peak_mib": round(answers[name]["peak_bytes"] / 2**20),
                    "tokens_per_second_by_round": [round(1 / value, 1) for value in some],
                }
                for name, some in seconds_a_token.items()
            },
            "speed_ratio_to": {
                f"{ours} to {theirs}": paired_ratio(seconds_a_token[ours], seconds_a_token[theirs])
                for ours in racers
                if ours.startswith("meshwright")
                for theirs in racers
                if theirs.startswith("trainer")
            },
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("place", nargs="?", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="steps per round")
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS)
    options = parser.parse_args()
    if options.name is None:
        with tempfile.TemporaryDirectory() as place:
            race(options, Path(place))
        return
    import torch

    torch.set_num_threads(2)
    if options.name.startswith("meshwright"):
        meshwright(options.place, options.name == "meshwright-compiled")
    else:
        trainer(options.place, options.name)


if __name__ == "__main__":
    main()
