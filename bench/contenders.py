"""One contender of a training race, as a process: `python bench/contenders.py NAME --threads 2 [--shape JSON]`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import forget_peak, peak_resident_bytes, serve_turns
from peers import SHAPE, PlainModel, hugging_face_config, random_batches

WARM_STEPS = 4


def plain(shape: dict[str, int]) -> None:
    """The hand-written loop in the manner of nanoGPT."""
    torch.manual_seed(0)
    model = PlainModel(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    compiled = torch.compile(model)
    batches = random_batches(shape)
    losses: list[float] = []

    def step() -> None:
        tokens, targets = next(batches)
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())

    serve_turns(step, lambda: {"loss": losses[-1], "peak_bytes": peak_resident_bytes()}, WARM_STEPS)


def meshwright(shape: dict[str, int]) -> None:
    """Our own trainer, the whole step as `meshwright train` runs it."""
    from meshwright.monitoring.memory import keep_freed_memory
    from synthetic import synthetic_trainer

    keep_freed_memory()  # as in every rank of `meshwright train`
    trainer = synthetic_trainer(shape, "bf16", compile_blocks=True)
    losses: list[float] = []

    def step() -> None:
        losses.append(trainer.step().loss)

    serve_turns(
        step,
        lambda: {
            "loss": losses[-1],
            "peak_bytes": peak_resident_bytes(),
            "seconds_by_part": trainer.clock.seconds(),
        },
        WARM_STEPS,
    )


def trainer(shape: dict[str, int], compiled: bool) -> None:
    """The transformers Trainer: bf16 autocast, SDPA, fused AdamW; steps are counted between its own callbacks."""
    import tempfile

    from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(hugging_face_config(shape), attn_implementation="sdpa")

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            for tokens, targets in random_batches(shape):
                # The Trainer's model shifts labels itself: the sequence plus its last target is the same work.
                row = torch.cat((tokens, targets[:, -1:]), dim=1)[:, : shape["sequence"]]
                for one in row:
                    yield {"input_ids": one, "labels": one}

    class Turns(TrainerCallback):
        """Waits for its turn before a step and answers after the last of the turn."""

        def __init__(self) -> None:
            self.left, self.seconds, self.begun, self.warm = WARM_STEPS, [], 0.0, False

        def on_step_begin(self, *arguments: Any, **named: Any) -> None:
            if self.left == 0:
                line = sys.stdin.readline()
                if not line:
                    os._exit(0)
                self.left, self.seconds = json.loads(line)["run"], []
            self.begun = time.perf_counter()

        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            self.seconds.append(time.perf_counter() - self.begun)
            self.left -= 1
            if self.left == 0:
                if not self.warm:
                    self.warm = True
                    forget_peak()
                print(json.dumps({"seconds": self.seconds, "peak_bytes": peak_resident_bytes()}), flush=True)

    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            per_device_train_batch_size=shape["batch"],
            max_steps=10**6,
            bf16=True,
            use_cpu=True,
            torch_compile=compiled,
            optim="adamw_torch_fused",
            learning_rate=1e-3,
            weight_decay=0.1,
            max_grad_norm=1.0,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        Trainer(model, arguments, train_dataset=Endless(), callbacks=[Turns()]).train()


def main() -> None:
    """Start the contender named on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=("meshwright", "plain", "trainer", "trainer-compiled"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", type=json.loads, default=SHAPE)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.name == "plain":
        plain(options.shape)
    elif options.name == "meshwright":
        meshwright(options.shape)
    else:
        trainer(options.shape, options.name == "trainer-compiled")


if __name__ == "__main__":
    main()
