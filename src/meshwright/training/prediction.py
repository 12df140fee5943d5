"""Predicts memory, step time and traffic of a run before its first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, cast

import torch

from meshwright.errors import UserError
from meshwright.monitoring.comparison import Prediction, ProcessMemory
from meshwright.monitoring.step_memory import STEPS, StepMemory
from meshwright.planner import engines
from meshwright.planner.attention_tiles import Starts
from meshwright.planner.cluster import Cluster, cluster, this_machine
from meshwright.planner.devices import find_device
from meshwright.planner.ledger import Ledger, ledger
from meshwright.planner.reference_step import in_place
from meshwright.planner.step_time import StepTime, default_precision, step_time
from meshwright.training.first_start import find_hardware_profile, measurement_advice
from meshwright.training.language_model import LanguageModelTask
from meshwright.training.process_constants import ProcessKey
from meshwright.training.process_memory import predict_process_memory
from meshwright.training.trainer import Trainer

Found = TypeVar("Found")


def predict(trainer: Trainer, memory: StepMemory | None = None) -> Prediction:
    """Predict memory, step time and traffic before the first step; never raises: an unavailable prediction is None plus
    a note. memory: what is known of the process."""
    notes: list[str] = []

    def tried(what: str, work: Callable[[], Found]) -> Found | None:
        try:
            return work()
        except UserError as error:
            notes.append(f"{what} is not predicted: {error}")
        except Exception as error:  # a fault of the planner, and not of this run
            notes.append(f"{what} is not predicted, by a fault of the planner: {type(error).__name__}: {error}")
        return None

    machine = tried("the time of a step", lambda: machine_of(trainer))
    time = None if machine is None else tried("the time of a step", lambda: _time(trainer, machine))
    found = tried("memory", lambda: _ledger(trainer, machine, notes))
    share = _unexplained_share(machine)
    process = None
    if found is not None and memory is not None and trainer.device.type == "cpu":
        process = tried("process memory", lambda: _process(trainer, found, memory, share))
    axes = tried("what is sent", trainer.task.predicted_traffic_by_axis)
    tensors = None if found is None else _memory(found, share)
    return Prediction(tensors, time, axes, machine, trainer.recipe.train.compile, tuple(notes), process)


def machine_of(trainer: Trainer) -> Cluster:
    """The ranks' devices: as `meshwright probe` or a start of a run measured them, else the catalogue's. `UserError`
    where neither is."""
    device, ranks = trainer.device, trainer.mesh.world_size
    known = None
    if device.type == "cuda":
        known = find_device(torch.cuda.get_device_name(device))
    if device.type == "cpu":
        threads = torch.get_num_threads()
        processors = find_hardware_profile(ranks, threads)
        if processors is not None:
            return _part(processors, ranks)
        each = f"{ranks} rank{'s' * (ranks > 1)} x {threads} thread{'s' * (threads > 1)}"
        advice = measurement_advice(trainer.recipe.run.device)
        raise UserError(f'no hardware profile for {each}; run "meshwright probe", or {advice}')
    if this_machine().exists():
        found = cluster("this")
        alike = found.kind == device.type and (known is None or found.device.name == known.name)
        if alike and found.devices >= ranks:
            return _part(found, ranks)
    if known is not None:
        return cluster({"device": known.name, "devices": ranks, "devices_per_node": _whole(ranks, _local(device))})
    many = f"{ranks} rank{'s' if ranks > 1 else ''}"
    raise UserError(f'no hardware profile for {many}; run "meshwright probe"')


def _local(device: torch.device) -> int:
    return torch.cuda.device_count() if device.type == "cuda" else 1


def _whole(ranks: int, most: int) -> int:
    """The largest node of at most so many devices of which `ranks` are several."""
    return next(size for size in range(max(1, min(ranks, most)), 0, -1) if ranks % size == 0)


def _part(whole: Cluster, ranks: int) -> Cluster:
    """So many devices of it."""
    return replace(whole, devices=ranks, devices_per_node=_whole(ranks, whole.devices_per_node))


def _time(trainer: Trainer, machine: Cluster) -> StepTime:
    train, task = trainer.recipe.train, _language_model(trainer)
    tokens = task.tokens
    documents = 1.0
    if tokens.document_mask:  # a row of S tokens has a part of one more document than begin in it
        documents += tokens.documents * tokens.sequence / max(1, tokens.tokens)
    return step_time(
        task.config, trainer.layout, machine, trainer.recipe.data.sequence, train.batch, compile=train.compile,
        optimizer=_optimizer(trainer), documents=documents, pairs=task.objective.pair_loss is not None,
        in_place=in_place(
            machine, trainer.layout.precision or default_precision(machine),
            engines.engine("meshwright", compile=train.compile),
        ),
    )  # fmt: skip


def _ledger(trainer: Trainer, machine: Cluster | None, notes: list[str]) -> Ledger:
    task = _language_model(trainer)
    tokens = task.tokens
    documents: bool | Starts = tokens.document_mask and tokens.documents > 1
    if documents and trainer.device.type == "cpu":  # where they begin decides what its attention holds
        documents = task.document_starts(trainer.steps_done, STEPS)
    found = ledger(
        task.config, trainer.layout, batch=trainer.recipe.train.batch, sequence=trainer.recipe.data.sequence,
        optimizer=_optimizer(trainer), rank=trainer.mesh.rank, device=trainer.device.type,
        documents=documents, pairs=task.objective.pair_loss is not None,
        compile=trainer.recipe.train.compile, architecture="" if machine is None else machine.device.architecture,
    )  # fmt: skip
    if trainer.recipe.train.compile and not found.compiled:
        notes.append("memory is predicted as if blocks were not compiled")
    return found


def _memory(found: Ledger, share: float) -> dict[str, int]:
    return found.by_category() | {"unexplained": round(share * found.peak_bytes), "peak": found.peak_bytes}


def _unexplained_share(machine: Cluster | None) -> float:
    """What finished runs needed beyond their predictions, of the whole."""
    calibration = None if machine is None else machine.calibration
    return 0.0 if calibration is None else calibration.unexplained_share or 0.0


def _process(trainer: Trainer, found: Ledger, memory: StepMemory, share: float) -> ProcessMemory:
    key = ProcessKey(trainer.layout.precision or "fp32", torch.get_num_threads(), trainer.recipe.train.compile)
    constants = key.read()
    if constants is None:
        advice = measurement_advice(trainer.recipe.run.device)
        raise UserError(f"no process-memory profile for this precision and thread count; {advice}")
    return predict_process_memory(trainer, found, memory.resident_before, constants, share)


def _language_model(trainer: Trainer) -> LanguageModelTask:
    return cast(LanguageModelTask, trainer.task)


def _optimizer(trainer: Trainer) -> str:
    train = trainer.recipe.train
    return "momentum" if train.optimizer == "sgd" and train.momentum else train.optimizer
