"""User modules that ranks train in tests of meshwright.training.module, and plain torch's results for them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

from meshwright.comm.mesh import Mesh
from meshwright.data.order import SampleOrder
from meshwright.layout import Layout
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.monitoring.trackers import TrackedRun
from meshwright.spec.foreign import refuse_for_module
from meshwright.training.module.building import build_task
from meshwright.training.module.data import derive_seed, seed_generators
from meshwright.training.module.recipe import ModuleRecipe, make_module_recipe
from meshwright.training.module.run import ModuleRun
from meshwright.training.module.spec import ModuleSpec
from meshwright.training.trainer import Trainer

__all__ = ["Layout", "refuse_for_module"]

SEED, BATCH, STEPS, RATE = 3, 8, 3, 0.05
SAMPLES = 21


class Tied(nn.Module):
    """Module with an embedding tied to the head, blocks in a list, a scalar parameter, a frozen table, a block that
    some steps skip, and a bias that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12)) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.frozen = nn.Parameter(torch.randn(12), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5))
        self.head = nn.Linear(12, 23, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x_BSH = self.embedding(tokens_BS) + self.frozen
        for number, block in enumerate(self.blocks):
            if number != 2:
                x_BSH = x_BSH + self.scale * block(x_BSH)
            elif (chosen := tokens_BS[:, 0] % 3 == 0).any():  # skipped on some ranks
                x_BSH = x_BSH + chosen[:, None, None] * self.scale * block(x_BSH)
        return self.head(x_BSH.mean(1))


class Outside(nn.Module):
    """Module that uses a unit's parameters from outside, enters a unit twice, and uses its units in another order than
    it defines them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[3](x)
        x = functional.linear(x, self.layers[1].weight).tanh()
        x = self.layers[0](self.layers[2](self.layers[0](x)).relu())
        x = x + self.layers[1](x)
        return functional.linear(x, self.layers[2].weight)  # outside the forward of that layer


class Again(nn.Module):
    """Module with activation checkpointing of one block and of two blocks at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 10)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.blocks[0], x, use_reentrant=False)
        x = checkpoint(lambda y: self.blocks[2](self.blocks[1](y)), x, use_reentrant=False)
        return checkpoint(self.blocks[3], x, use_reentrant=True)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 10, num_layers=2, batch_first=True)
        self.head = nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def convolution() -> nn.Module:
    """Module with a batch norm in eval mode."""
    net = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 5))
    net[1].eval()
    return net


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=31,
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=12,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=4,
        )
    ).eval()


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=29,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


def compiled() -> nn.Module:
    """Module traced and differentiated as by torch.compile, and run without generated code."""
    module = Straight()
    module.compile(backend="aot_eager")
    return module


def _classes(module: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(module(batch[0]), batch[1])


def _targets(module: nn.Module, batch: Any) -> torch.Tensor:
    return functional.mse_loss(module(batch[0]), batch[1])


def _sequences(module: nn.Module, batch: Any) -> torch.Tensor:
    return module(input_ids=batch[0], labels=batch[1]).loss


def _labels(batch: Any) -> torch.Tensor:
    return (batch[1] != -100).sum()


def _drawn(draw: Callable[[torch.Generator], Any]) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    return [draw(generator) for _ in range(SAMPLES)]


def _real(*shape: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda generator: torch.randn(shape, generator=generator, dtype=torch.float64)


def _whole(top: int, *shape: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda generator: torch.randint(0, top, shape, generator=generator)


def _pair(*draws: Callable[[torch.Generator], Any]) -> list[Any]:
    return _drawn(lambda generator: tuple(draw(generator) for draw in draws))


def _some_labels(generator: torch.Generator) -> torch.Tensor:
    """Labels of sequences; some samples have none that counts."""
    labels = torch.randint(1, 29, (6,), generator=generator)
    labels[int(torch.randint(0, 7, (), generator=generator)) :] = -100
    return labels


MODULES: dict[str, tuple[Callable[[], nn.Module], Any, list[Any], Any]] = {
    "tied": (Tied, _classes, _pair(_whole(23, 5), _whole(23)), None),
    "outside": (Outside, _targets, _pair(_real(10), _real(10)), None),
    "computed again": (Again, _targets, _pair(_real(10), _real(10)), None),
    "compiled": (compiled, _targets, _pair(_real(10), _real(10)), None),
    "lstm": (Recurrent, _classes, _pair(_real(7, 6), _whole(4)), None),
    "convolution": (convolution, _classes, _pair(_real(2, 6, 6), _whole(5)), None),
    "bert": (bert, _sequences, _pair(_whole(31, 9), _whole(4)), None),
    "t5": (t5, _sequences, _pair(_whole(29, 7), _some_labels), _labels),
}


def double(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: build().double()


def build_trainer(spec: ModuleSpec, recipe: ModuleRecipe, mesh: Mesh) -> Trainer:
    return Trainer(build_task(spec, recipe, mesh))


def module_spec(name: str, **changes: Any) -> ModuleSpec:
    build, loss, data, count = MODULES[name]
    given: dict[str, Any] = {
        "build": double(build), "loss": loss, "data": data, "collate": default_collate, "count": count,
        "reduction": "mean", "validation": None, "measures": {}, "units": None, "decays": None, "workers": 0,
    }  # fmt: skip
    return ModuleSpec(**(given | changes))


def recipe(layout: str, **train: Any) -> Any:
    settings = {
        "steps": STEPS, "batch": BATCH, "optimizer": "sgd", "learning_rate": RATE, "schedule": "constant", "clip": 0.0,
        "weight_decay": 0.0,
    }  # fmt: skip
    return make_module_recipe({"layout": layout, "run": {"seed": SEED}, "train": settings | train})


def plain(name: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Return loss and gradient norm of each step, and the parameters after them, of plain torch on one device in
    float64."""
    build, loss, data, count = MODULES[name]
    seed_generators(derive_seed(SEED, "module"), torch.device("cpu"))
    module = build().double()
    if not module.training:
        module.train()
    trained = [each for each in module.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE)
    order = SampleOrder(SEED, len(data))
    losses, norms = [], []
    for step in range(STEPS):
        samples = [data[index] for index in order.sample(range(step * BATCH, (step + 1) * BATCH)).tolist()]
        weights = [1 if count is None else int(count(default_collate([sample]))) for sample in samples]
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for sample, weight in zip(samples, weights, strict=True):
            if weight:
                total = total + loss(module, default_collate([sample])) * weight / sum(weights)
        total.backward()
        found = [each.grad for each in trained if each.grad is not None]
        losses.append(total.item())
        norms.append(torch.cat([each.reshape(-1) for each in found]).norm().item())
        optimizer.step()
    return losses, norms, {key: value.detach() for key, value in module.named_parameters()}


def train_on_ranks(name: str, layout: str, **changes: Any) -> dict[str, Any]:
    """Train on this rank of a layout; return losses, norms, the slices that it owns, its log and its traffic."""
    torch.set_num_threads(1)
    mesh = Mesh.create(Layout.parse(layout), "cpu", 60.0)
    with closing(mesh):
        trainer = build_trainer(module_spec(name, **changes.pop("task", {})), recipe(layout, **changes), mesh)
        verdicts, sent, predicted_sent = [], [], []
        for _ in range(STEPS):
            mesh.record.clear()
            verdicts.append(trainer.step())
            sent.append(mesh.record.sent_by_site())
            predicted_sent.append(trainer.task.predicted_traffic())
        return {
            "losses": [verdict.loss for verdict in verdicts],
            "norms": [verdict.gradient_norm for verdict in verdicts],
            "pieces": [
                (piece.name, piece.start, piece.stop, piece.tensor.clone())
                for piece in trainer.slices(owned=True)
                if piece.kind == "master"
            ],
            "sent": sent[1:],  # the first step records the order of units
            "predicted_sent": predicted_sent[1:],
            "memory": trainer.memory(),
            "predicted_memory": trainer.predicted_bytes(),
            "units": trainer.task.table.units,
            "held": trainer.passes.prefetcher.held,
        }


def assembled(outcomes: list[dict[str, Any]], like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Assemble the whole parameters from the slices that ranks own: every element once."""
    values = {name: torch.full((value.numel(),), torch.nan, dtype=torch.float64) for name, value in like.items()}
    for outcome in outcomes:
        for name, start, stop, part in outcome["pieces"]:
            if name in values:
                assert values[name][start:stop].isnan().all(), f"{name}: twice"
                values[name][start:stop] = part
    return {name: value.view(like[name].shape) for name, value in values.items()}


# --- whole runs


def run_until_killed(running: ModuleRun, steps: int) -> dict[str, Any]:
    """Run to the end, or with `steps` above 0 fail after this number of steps as if killed: the result is then {}."""
    step = running.trainer.launch_step

    def fail_after(**options: Any) -> Any:
        if running.trainer.steps_done == steps:
            raise RuntimeError("killed")
        return step(**options)

    with mock.patch.object(running.trainer, "launch_step", fail_after if steps else step):
        try:
            return running.run()
        except RuntimeError as error:
            assert str(error) == "killed"
            return {}


def run(
    directory: str, layout: str, crash_after: int = 0, track: dict[str, Any] | None = None, **train: Any
) -> dict[str, Any]:
    """Run the training of a module with dropout and running statistics in float32, as `fit` does; after the step
    `crash_after`, if any, the process "dies"."""
    torch.set_num_threads(1)
    tables = {
        "layout": layout,
        "run": {"seed": SEED, "directory": directory},
        "train": {"steps": 6, "batch": BATCH, "learning_rate": 0.01, "validate_every": 3} | train,
        "checkpoint": {"every": 2, "background": False},
        "track": track or {},
    }
    found = make_module_recipe(tables)
    mesh = Mesh.create(found.parsed_layout, "cpu", 60.0)
    with closing(mesh):
        chosen = module_spec("lstm", build=Noisy, loss=_classes, data=NOISY, validation=NOISY[:10], measures=MEASURES)
        running = ModuleRun(found, mesh, RunDirectory(directory), chosen, show_progress=False)
        if not (result := run_until_killed(running, crash_after)):
            return {}
        pieces = [
            (piece.kind, piece.name, piece.start, piece.stop, piece.tensor.clone())
            for piece in running.trainer.slices(owned=True)
        ]
        return {"result": result, "pieces": pieces}


def profiled_and_tracked(directory: str) -> dict[str, Any]:
    """The same run with steps 3 and 4 profiled, and with a tracker."""
    track = {
        "to": [f"{__name__}:RecordingTracker"],
        "options": {f"{__name__}:RecordingTracker": {"file": f"{directory}/tracked.jsonl"}},
    }
    return run(directory, "dp2 zero3", track=track, profile="3:4")


class RecordingTracker:
    """Tracker that writes what it receives to a file."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def start(self, run: TrackedRun, recipe: Mapping[str, Any]) -> None:
        self._write(recipe=dict(recipe))

    def log(self, step: int, values: Mapping[str, float | str]) -> None:
        self._write(step=step, values=dict(values))

    def finish(self, status: str) -> None:
        self._write(status=status)

    def _write(self, **what: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(what) + "\n")


class Noisy(nn.Module):
    """Module with dropout, running statistics and layers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)) for _ in range(3)
        )
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class _Shaking(list[Any]):
    """Samples with random draws."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return _Shaking(list(self)[index])
        x, y = super().__getitem__(index)
        return x + 0.01 * torch.randn(6), y


def _float(pair: Any) -> Any:
    return pair[0].float(), pair[1]


NOISY = _Shaking(map(_float, _pair(_real(6), _whole(4))))
MEASURES = {"accuracy": lambda module, batch: (module(batch[0]).argmax(-1) == batch[1]).sum()}


def statistics_of_one_step() -> bool:
    """Return True for each running mean that is the mean over ranks of the statistics of their samples."""
    mesh = Mesh.create(Layout.parse("dp2"), "cpu", 60.0)
    with closing(mesh):
        chosen = module_spec("lstm", build=lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4)).double())
        chosen = dataclasses.replace(chosen, loss=_classes, data=_pair(_real(6), _whole(4)))
        trainer = build_trainer(chosen, recipe("dp2"), mesh)
        order = SampleOrder(SEED, SAMPLES).sample(range(BATCH)).tolist()
        means = [
            torch.stack([chosen.data[index][0] for index in order[first : first + BATCH // 2]]).mean(0)
            for first in (0, BATCH // 2)
        ]
        trainer.step()
        return torch.allclose(trainer.task.module[0].running_mean, 0.1 * (means[0] + means[1]) / 2, rtol=1e-12)


def evaluated_elsewhere() -> tuple[float, float, set[str]]:
    """Return measures whose computation uses other submodules than the loss, before a step and on one device."""
    mesh = Mesh.create(Layout.parse("dp2 zero3"), "cpu", 60.0)
    with closing(mesh):
        data = _pair(_real(10), _real(10))[:8]

        def norm(module: nn.Module, batch: Any) -> torch.Tensor:
            return functional.linear(batch[0], module.layers[2].weight).square().sum()

        chosen = module_spec(
            "computed again", build=double(Straight), data=data, validation=data, measures={"norm": norm}
        )
        trainer = build_trainer(chosen, recipe("dp2 zero3", validation_sequences=8), mesh)
        seed_generators(derive_seed(SEED, "module"), torch.device("cpu"))
        alone = double(Straight)()
        whole = sum(norm(alone, (x[None],)).item() for x, _ in data) / len(data)
        first = trainer.task.validate().metrics.values["norm"]
        assert trainer.task.validate().metrics.values["norm"] == first
        return first, whole, trainer.passes.prefetcher.held


class Straight(nn.Module):
    """Layers one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def refused(directory: str, case: str) -> None:
    """Run with invalid arguments."""
    tables = {
        "layout": "dp2 zero3", "run": {"seed": SEED, "directory": directory},
        "train": {"steps": 6, "batch": BATCH, "learning_rate": 0.01}, "checkpoint": {"every": 2},
    }  # fmt: skip
    found = make_module_recipe(tables)
    mesh = Mesh.create(found.parsed_layout, "cpu", 60.0)
    with closing(mesh):

        def build() -> nn.Module:
            net = Noisy()
            if case == "wider" or (case == "by rank" and mesh.rank):
                net.head = nn.Linear(6, 5)
            return net

        loss = (lambda module, batch: module(batch[0])) if case == "loss of many" else _classes
        data = NOISY[:20] if case == "fewer samples" else NOISY
        chosen = module_spec("lstm", build=build, loss=loss, data=data)
        ModuleRun(found, mesh, RunDirectory(directory), chosen, show_progress=False).run()
