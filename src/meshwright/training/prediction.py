"""Predict memory, step time and traffic of a run before its first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from meshwright.emulation.scheduler import is_emulated_rank
from meshwright.errors import UserError
from meshwright.monitoring.comparison import Prediction, ProcessMemory
from meshwright.monitoring.step_memory import STEPS, StepMemory
from meshwright.planner.cost import engines
from meshwright.planner.cost.micro_batch import Starts
from meshwright.planner.cost.reference_step import measured_step_factors
from meshwright.planner.cost.step_time import StepTime, default_precision, step_time
from meshwright.planner.hardware.cluster import Cluster, cluster, this_machine
from meshwright.planner.hardware.devices import find_device
from meshwright.planner.hardware.machine_profile import HardwareProfileKey, ProcessKey
from meshwright.planner.memory.ledger import Ledger, ledger
from meshwright.threads import count_available_cores
from meshwright.training.first_start import describe_missing, find_hardware_profile
from meshwright.training.process_memory import get_language_model, predict_process_memory
from meshwright.training.trainer import Trainer

T = TypeVar("T")


def predict(trainer: Trainer, memory: StepMemory | None = None) -> Prediction:
    """Predict memory, step time and traffic of the trainer's run. Never raises: a prediction that fails is None in the
    result, whose `notes` give the reason.

    memory: meter with the measured resident memory of this process; None: process memory is not predicted."""
    notes: list[str] = []

    def try_predict(what: str, work: Callable[[], T]) -> T | None:
        """Return `work()`; if it raises, add the note that `what` (such as "memory") is not predicted and the reason,
        and return None."""
        try:
            return work()
        except UserError as error:
            notes.append(f"{what} is not predicted: {error}")
        except Exception as error:  # an error of the planner, not of this run
            notes.append(f"{what} is not predicted: error in the planner: {type(error).__name__}: {error}")
        return None

    machine = try_predict("step time", lambda: find_training_cluster(trainer))
    time = None if machine is None else try_predict("step time", lambda: _predict_step_time(trainer, machine))
    found = try_predict("memory", lambda: _predict_ledger(trainer, machine, notes))
    share = _find_unexplained_share(machine)
    process = None
    if found is not None and memory is not None and trainer.device.type == "cpu" and not is_emulated_rank():
        process = try_predict("process memory", lambda: _predict_process_memory(trainer, found, memory, share))
    axes = try_predict("traffic", trainer.task.predicted_traffic_by_axis)
    tensors = None if found is None else _sum_bytes_by_category(found, share)
    return Prediction(tensors, time, axes, machine, trainer.recipe.train.compile, tuple(notes), process)


def find_training_cluster(trainer: Trainer) -> Cluster:
    """Return the speeds and links of the devices on which the trainer's ranks run: from a stored hardware profile
    (measured speeds) of this machine or, for known GPUs, from the device catalogue. `UserError` if there is neither."""
    device, ranks = trainer.device, trainer.mesh.world_size
    known = None
    if device.type == "cuda":
        known = find_device(torch.cuda.get_device_name(device))
    if device.type == "cpu":
        if is_emulated_rank():
            raise UserError("emulated ranks run one at a time")
        threads = torch.get_num_threads()
        processors = find_hardware_profile(ranks, threads)
        if processors is not None:
            return _select_devices(processors, ranks)
        each = f"{ranks} rank{'s' * (ranks > 1)} x {threads} thread{'s' * (threads > 1)}"
        path = HardwareProfileKey.here(count_available_cores(), ranks, threads).path
        what, other = f"no hardware profile for {each}", 'run "meshwright probe"'
        raise UserError(describe_missing(what, trainer.recipe.run.device, path, other))
    if this_machine().exists():
        found = cluster("this")
        alike = found.kind == device.type and (known is None or found.device.name == known.name)
        if alike and found.devices >= ranks:
            return _select_devices(found, ranks)
    if known is not None:
        node = _assume_devices_per_node(ranks, torch.cuda.device_count())
        return cluster({"device": known.name, "devices": ranks, "devices_per_node": node})
    many = f"{ranks} rank{'s' if ranks > 1 else ''}"
    raise UserError(f'no hardware profile for {many}; run "meshwright probe"')


def _assume_devices_per_node(ranks: int, most: int) -> int:
    """Return the assumed number of devices per node: the largest divisor of `ranks` that is at most `most`, the maximum
    for a node.
    """
    return next(size for size in range(max(1, min(ranks, most)), 0, -1) if ranks % size == 0)


def _select_devices(whole: Cluster, ranks: int) -> Cluster:
    """Return a description of `ranks` devices of the cluster `whole`."""
    return replace(whole, devices=ranks, devices_per_node=_assume_devices_per_node(ranks, whole.devices_per_node))


def _predict_step_time(trainer: Trainer, machine: Cluster) -> StepTime:
    """Predict the step time of the trainer's run, in seconds by phase. machine: description of its devices."""
    train, task = trainer.recipe.train, get_language_model(trainer)
    tokens = task.tokens
    documents = 1.0
    if tokens.document_mask:  # a sequence holds part of one more document than begin in it
        documents += tokens.documents * tokens.sequence / max(1, tokens.tokens)
    return step_time(
        task.config, trainer.layout, machine, trainer.recipe.data.sequence, train.batch, compile=train.compile,
        optimizer=train.planned_optimizer, documents=documents, pairs=task.objective.pair_loss is not None,
        teacher=task.objective.teacher_work,
        engine=engines.choose_run_engine(
            train.tensor_overlap, trainer.device.type, train.compile, train.cuda_graphs
        ),
        step_factors=measured_step_factors(
            machine, trainer.layout.precision or default_precision(machine),
            engines.engine("meshwright", compile=train.compile),
        ),
    )  # fmt: skip


def _predict_ledger(trainer: Trainer, machine: Cluster | None, notes: list[str]) -> Ledger:
    """Predict the memory of the trainer's rank as a ledger: a list of tensors with their bytes and lifetimes. Append a
    line to `notes` if the effect of torch.compile is unknown. machine: description of the devices, None if unknown."""
    task = get_language_model(trainer)
    tokens = task.tokens
    documents: bool | Starts = tokens.document_mask and tokens.documents > 1
    if documents and trainer.device.type == "cpu":  # document starts determine the memory of CPU attention
        documents = task.document_starts(trainer.steps_done, STEPS)
    found = ledger(
        task.config, trainer.layout, batch=trainer.recipe.train.batch, sequence=trainer.recipe.data.sequence,
        optimizer=trainer.recipe.train.planned_optimizer, rank=trainer.mesh.rank, device=trainer.device.type,
        documents=documents, pairs=task.objective.pair_loss is not None,
        teacher=task.objective.teacher_work,
        compile=trainer.recipe.train.compile, architecture="" if machine is None else machine.device.architecture,
        graphs=trainer.recipe.train.cuda_graphs and trainer.device.type == "cuda",
        engine=engines.choose_run_engine(
            trainer.recipe.train.tensor_overlap, trainer.device.type, trainer.recipe.train.compile
        ),
    )  # fmt: skip
    if trainer.recipe.train.compile and not found.compiled:
        notes.append("memory is predicted as if blocks were not compiled")
    return found


def _sum_bytes_by_category(predicted: Ledger, share: float) -> dict[str, int]:
    """Return {category: bytes} at the predicted memory peak ("parameters", "activations" ...), with two further
    entries: "peak", the predicted peak, and "unexplained", `share` times the peak.

    predicted: memory ledger (tensors with their bytes and lifetimes). share: mean fraction by which the memory of
    finished runs exceeded their predicted peak."""
    return predicted.by_category() | {"unexplained": round(share * predicted.peak_bytes), "peak": predicted.peak_bytes}


def _find_unexplained_share(machine: Cluster | None) -> float:
    """Return the mean fraction by which the measured peak memory of finished runs on `machine` exceeded the predicted
    peak; 0.0 if no run was recorded or `machine` is None."""
    calibration = None if machine is None else machine.calibration
    return 0.0 if calibration is None else calibration.unexplained_share or 0.0


def _predict_process_memory(trainer: Trainer, predicted: Ledger, memory: StepMemory, share: float) -> ProcessMemory:
    """Predict the peak resident memory of this process, which runs the trainer on a CPU, in bytes by item.

    predicted: memory ledger of this rank (tensors with their bytes and lifetimes); memory: meter that has recorded the
    process's memory so far; share: fraction by which the memory of finished runs exceeded their prediction. `UserError`
    if the process memory of this precision and thread count was never measured."""
    key = ProcessKey(trainer.layout.precision or "fp32", torch.get_num_threads(), trainer.recipe.train.compile)
    constants = key.read()
    if constants is None:
        what = "no process-memory profile for this precision and thread count"
        raise UserError(describe_missing(what, trainer.recipe.run.device, key.path))
    return predict_process_memory(trainer, predicted, memory.resident_before, constants, share)
