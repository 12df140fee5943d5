"""Training steps by `transformers`, autograd and `torch.optim`: an independent reference for `Trainer.step`.

It shares with Meshwright only the samples of a step (data/) and the names of tensors on disk. Documents are computed
one by one, so that positions and masks of packed sequences are right by construction.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from meshwright.comm.mesh import Mesh
from meshwright.data import TokenBatch, prepare
from meshwright.layout import Layout
from meshwright.parallel.flat_buffers import TensorSlice
from meshwright.recipe import Recipe, TrainRecipe, load_recipe_text
from meshwright.spec.config_json import config_from_huggingface, config_from_path, config_to_huggingface
from meshwright.spec.parameters import parameter_table
from meshwright.training.language_model import LanguageModelTask
from meshwright.training.model_config import resolve_model_config
from meshwright.training.precision import Arithmetic
from meshwright.training.trainer import Trainer
from tests.model.transformers_names import entry_in_transformers
from tests.training.training_cases import Values

STEPS = 3
"""Steps that are compared, of the five that the learning-rate schedule is made for."""
STATE_KINDS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum": "momentum_buffer"}
"""Our name of each kind of optimizer state, and torch's."""

SIZES: dict[str, Any] = {
    "vocab_size": 263, "hidden_size": 24, "intermediate_size": 38, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TRAIN: dict[str, Any] = {
    "steps": 5, "batch": 4, "learning_rate": 0.02, "warmup": 1, "weight_decay": 0.3, "epsilon": 1e-5, "clip": 0.25,
    "minimum_learning_rate": 0.2, "router_bias_rate": 0.01,
}  # fmt: skip
SGD = {"optimizer": "sgd", "momentum": 0.8, "learning_rate": 0.3}


@dataclass(frozen=True)
class Case:
    """A model and its training. settings: of its config.json; train: changes of `TRAIN`; data: changes of [data];
    layout: on one device."""

    settings: Mapping[str, Any]
    train: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    layout: str = "mb2"


@dataclass
class Steps:
    """Outcome of `STEPS` training steps: loss and gradient norm before clipping of each; master weights before them,
    and master weights with optimizer state after them, by (kind, entry), flat as the model stores them."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    before: Values = field(default_factory=dict)
    after: Values = field(default_factory=dict)


def write_data(place: Path) -> None:
    """Write documents of very different lengths (in bytes, which are tokens), and instructions with responses."""
    draw = random.Random(0)
    letters = "abcdefgh ijklmnop\n"
    lengths = [1900, 33, 210, 2, 640, 90, 310, 5, 170, 400]
    documents = ["".join(draw.choices(letters, k=length)) for length in lengths]
    (place / "documents.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in documents))
    records = [
        {
            "instruction": "".join(draw.choices(letters, k=20 + 13 * number)),
            "output": "".join(draw.choices(letters, k=k)),
        }
        for number, k in enumerate((1, 150, 40, 12, 90, 3, 220, 60, 33, 7, 25, 110))
    ]
    (place / "instructions.jsonl").write_text("\n".join(map(json.dumps, records)))


def recipe(place: Path, model: Path, case: Case) -> Recipe:
    """Return the recipe that trains the weights of directory `model` on the data of `write_data` in `place`."""
    data = {"source": "documents.jsonl", "sequence": 300, "tokenizer": "bytes", "validation_fraction": 0.0, **case.data}
    data |= {"source": str(place / data["source"]), "cache": str(place / "cache"), "clean": {"maximum_repetition": 1.0}}
    return Recipe.from_tables(
        {
            "layout": "dp1",
            "run": {"directory": str(place / "run"), "seed": 3, "device": "cpu"},
            "model": {"from": str(model), "load_weights": True},
            "data": data,
            "train": {**TRAIN, **case.train},
        }
    )


class TransformersModel:
    """Random float64 model that `transformers` builds from a `config.json` written by Meshwright. wide: context in
    which `transformers` computes in float64 throughout (the fixture `wide`)."""

    def __init__(
        self, settings: Mapping[str, Any], place: Path, wide: Callable[[], AbstractContextManager[None]]
    ) -> None:
        import transformers

        self.wide, self.directory = wide, place
        self.ours = config_from_huggingface(dict(settings))
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(config_to_huggingface(self.ours)))
        config = transformers.AutoConfig.from_pretrained(place)
        generator = torch.Generator().manual_seed(1)
        torch.manual_seed(1)
        with wide():
            self.model = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", experts_implementation="eager"
            ).double()
        self.model.eval()
        with torch.no_grad():  # away from zeros and ones, so that no layer is linear
            for name, values in self.tensors().items():
                noise = torch.randn(values.shape, generator=generator, dtype=torch.float64)
                values.add_(noise, alpha=0.12 if values.dim() > 1 and "embed" not in name else 0.3)
        self.model.save_pretrained(place)
        assert config_from_path(place) == self.ours
        self.table = parameter_table(self.ours)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return parameters, and router biases, which are buffers in transformers."""
        biases = {name: values for name, values in self.model.named_buffers() if name.endswith("correction_bias")}
        return {**dict(self.model.named_parameters()), **biases}

    def entries(self, tensors: Mapping[str, torch.Tensor], kind: str) -> Values:
        """Return tensors under the names of `transformers` as entries of the parameter table."""
        found = {}
        for entry in self.table.entries:
            if kind == "master" or not entry.balances:
                values = entry_in_transformers(tensors, entry.name)
                found[kind, entry.name] = (values.T if entry.transposed else values).detach().reshape(-1).clone()
        return found

    def loss(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return the summed token loss of a batch, the auxiliary loss, and the number of tokens routed to each expert,
        by router [E]. The auxiliary loss is that of `transformers` for one layer and one sequence, averaged over
        layers, with sequences weighted by their targets."""
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        config = self.ours
        total = auxiliary = torch.zeros((), dtype=torch.float64)
        routers = {name: module for name, module in self.model.named_modules() if name.endswith(".mlp.gate")}
        assert len(routers) == config.expert_layers if config.experts else not routers
        routed: dict[torch.nn.Module, list[Any]] = {}
        hooks = [
            router.register_forward_hook(lambda router, _, outputs: routed.setdefault(router, []).append(outputs))
            for router in routers.values()
        ]
        loads = {name: torch.zeros(config.experts, dtype=torch.int64) for name in routers}
        for tokens_S, targets_S, ids_S in zip(batch.tokens, batch.targets, batch.document_ids, strict=True):
            routed.clear()
            with self.wide():
                for start, stop in spans(ids_S):
                    logits_SV = self.model(torch.from_numpy(tokens_S[None, start:stop]), use_cache=False).logits[0]
                    targets = torch.from_numpy(targets_S[start:stop])
                    total = total + F.cross_entropy(logits_SV, targets, ignore_index=-100, reduction="sum")
                for name, router in routers.items():
                    logits_SE, _, chosen_SK = (torch.cat(parts) for parts in zip(*routed[router], strict=True))
                    loads[name] += torch.bincount(chosen_SK.flatten(), minlength=config.experts)
                    balance = load_balancing_loss_func((logits_SE,), config.experts, config.experts_per_token)
                    weight = config.router_loss / len(routers) * int((targets_S != -100).sum())
                    auxiliary = auxiliary + weight * balance
        for hook in hooks:
            hook.remove()
        return total, auxiliary, loads

    def train(self, recipe: Recipe) -> Steps:
        """Return `STEPS` steps of a recipe, with the whole batch on one device."""
        train, found = recipe.train, Steps()
        data = prepare(recipe.data, recipe.run.seed)
        split, order = data.split("train"), data.make_sample_order()
        found.before = self.entries(self.tensors(), "master")
        parameters = dict(self.model.named_parameters())
        groups = [
            {"params": [each for each in parameters.values() if each.dim() > 1], "weight_decay": train.weight_decay},
            {"params": [each for each in parameters.values() if each.dim() == 1], "weight_decay": 0.0},
        ]
        optimizer: torch.optim.Optimizer
        if train.optimizer == "adamw":
            betas = (train.betas[0], train.betas[1])
            optimizer = torch.optim.AdamW(groups, lr=train.learning_rate, betas=betas, eps=train.epsilon)
        else:
            optimizer = torch.optim.SGD(groups, lr=train.learning_rate, momentum=train.momentum)
        rates = learning_rates(optimizer, train)
        biases = dict(self.model.named_buffers())
        for step in range(STEPS):
            batch = split.read_batch(order.sample(np.arange(step * train.batch, (step + 1) * train.batch)))
            targets = int((batch.targets != -100).sum())
            optimizer.zero_grad()
            loss, auxiliary, loads = self.loss(batch)
            ((loss + auxiliary) / targets).backward()  # type: ignore[no-untyped-call]
            found.losses.append(float(loss.detach()) / targets)
            found.norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), train.clip or math.inf)))
            optimizer.step()
            rates.step()
            for router, load_E in loads.items():
                bias_E = biases.get(f"{router}.e_score_correction_bias")
                if bias_E is not None:
                    bias_E -= train.router_bias_rate * (load_E - load_E.double().mean()).sign()
        found.after = self.entries(self.tensors(), "master")
        for kind, theirs in STATE_KINDS.items():
            state = {name: optimizer.state[values].get(theirs) for name, values in parameters.items()}
            if None not in state.values():
                found.after |= self.entries(state, kind)
        return found


def learning_rates(optimizer: torch.optim.Optimizer, train: TrainRecipe) -> SequentialLR:
    """Return the documented schedule by torch's own schedulers: linear warm-up, then half a cosine wave."""
    rise = LinearLR(optimizer, 1 / (train.warmup + 1), total_iters=train.warmup)
    lowest = train.learning_rate * train.minimum_learning_rate
    fall = CosineAnnealingLR(optimizer, train.steps - 1 - train.warmup, lowest)
    return SequentialLR(optimizer, [rise, fall], [train.warmup])


def spans(ids_S: np.ndarray) -> Iterator[tuple[int, int]]:
    """Return first and last + 1 position of each document of a sequence."""
    changes = (1 + np.flatnonzero(ids_S[1:] != ids_S[:-1])).tolist()
    return itertools.pairwise([0, *changes, len(ids_S)])


def train_on_rank(text: str, layout: str) -> dict[str, Any]:
    """Run the same steps by `Trainer.step` on this rank of a layout, in float64; return losses, norms, and the master
    weights and optimizer state that it owns, before and after."""
    torch.set_num_threads(1)
    wanted = load_recipe_text(text, "recipe")
    data = prepare(wanted.data, wanted.run.seed)
    config = resolve_model_config(wanted, data)
    with closing(Mesh.create(Layout.parse(layout), "cpu", 60.0)) as mesh:
        task = LanguageModelTask(
            wanted,
            mesh.layout,
            config,
            data,
            mesh,
            initialise=False,
            arithmetic=Arithmetic(torch.float64, torch.float64),
        )
        trainer = Trainer(task)
        task.load_weights(Path(str(wanted.model.from_path)))
        before = owned(trainer)
        verdicts = [trainer.step() for _ in range(STEPS)]
        return {
            "losses": [verdict.loss for verdict in verdicts],
            "norms": [verdict.gradient_norm for verdict in verdicts],
            "before": before,
            "state": owned(trainer),
        }


def owned(trainer: Trainer) -> list[TensorSlice]:
    """Return copies of what a rank would write to a checkpoint."""
    return [replace(piece, tensor=piece.tensor.clone()) for piece in trainer.slices(owned=True)]
