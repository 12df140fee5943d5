"""What a run should take, said before its first step, and beside it what it took: memory by category, time by part,
bytes by axis."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch

from meshwright.errors import UserError
from meshwright.monitoring.step_memory import STEPS, StepMemory
from meshwright.planner import engines
from meshwright.planner.attention_tiles import Starts
from meshwright.planner.cluster import Cluster, cluster, this_machine
from meshwright.planner.devices import find_device
from meshwright.planner.ledger import OF_STATE, Ledger, ledger
from meshwright.planner.reference_step import in_place
from meshwright.planner.step_time import StepTime, default_precision, step_time
from meshwright.training.first_start import find_hardware_profile, measurement_advice
from meshwright.training.language_model import LanguageModelTask
from meshwright.training.process_constants import ProcessKey
from meshwright.training.process_memory import ProcessMemory, predict_process_memory
from meshwright.training.trainer import Trainer

WARM_UP = 2
"""Steps that are not typical: they compile, and memory is touched for the first time."""
KEPT = 1000
"""Of so many last steps the median is taken."""

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted memory, step time and traffic of rank 0.

    memory: bytes by ledger category at the peak and their sum "peak" (without "framework" and "unexplained"); time:
    None without a hardware profile; process: peak RSS by item, CPU only.
    """

    memory: Mapping[str, int] | None
    time: StepTime | None
    sent_by_axis: Mapping[str, int] | None
    machine: Cluster | None
    compiled: bool
    notes: tuple[str, ...] = ()
    process: ProcessMemory | None = None

    def document(self) -> dict[str, Any]:
        """What `predicted` of the result document has of it."""
        time, machine = self.time, self.machine
        calibration = None if machine is None else machine.calibration
        return {
            "memory_bytes": None if self.memory is None else {**self.memory, **self._peaks()},
            "process_memory_bytes": None if self.process is None else dict(self.process.items),
            "step_seconds": None if time is None else time.seconds,
            "step_seconds_low": None if time is None else time.low,
            "step_seconds_high": None if time is None else time.high,
            "seconds_by_part": None if time is None else dict(time.breakdown),
            "seconds_by_kind": None if time is None else _kinds(time.seconds, _waiting(time.breakdown)),
            "sent_bytes_by_axis": None if self.sent_by_axis is None else dict(self.sent_by_axis),
            "device": None if machine is None else machine.device.name,
            "calibration": None if calibration is None else calibration.table(),
            "compile": self.compiled,
        }

    def _peaks(self) -> dict[str, int | None]:
        assert self.memory is not None
        process = self.process
        return {"allocator_peak": self.memory["peak"], "process_peak": None if process is None else process.peak}

    def lines(self) -> list[str]:
        """For who watches."""
        parts = []
        if self.time is not None:
            found = None if self.machine is None else self.machine.calibration
            by = "" if found is None else f"; calibrated by {found.runs} run{'s' if found.runs > 1 else ''}"
            spread = f"{_short(self.time.low)} to {_short(self.time.high)}{by}"
            parts.append(f"{_short(self.time.seconds)} a step ({spread})")
        if self.process is not None and self.memory is not None:
            parts.append(
                f"process memory of rank 0 {_bytes(self.process.peak)} ({_largest(self.process.items)}), "
                f"of which tensors {_bytes(self.memory['peak'])}"
            )
        elif self.memory is not None:
            sizes = {name: size for name, size in self.memory.items() if name not in ("peak", "framework")}
            parts.append(f"tensors of rank 0 {_bytes(_expected(self.memory))} ({_largest(sizes)})")
        if self.sent_by_axis is not None:
            parts.append(f"{_sent(self.sent_by_axis)} sent a step")
        return [*([f"predicted: {'; '.join(parts)}"] if parts else []), *self.notes]


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
    assert isinstance(trainer.task, LanguageModelTask)
    return trainer.task


def _optimizer(trainer: Trainer) -> str:
    train = trainer.recipe.train
    return "momentum" if train.optimizer == "sgd" and train.momentum else train.optimizer


# --- what happened


class _Step(NamedTuple):
    seconds: float
    parts: Mapping[str, float]
    waited: float


class StepTimes:
    """Seconds of the steps of this process, by part, and of the host's waiting in collective calls."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=KEPT)
        self._warming = WARM_UP

    def add(self, seconds: float, parts: Mapping[str, float], waited: float) -> None:
        """A step whose update took place."""
        if self._warming:
            self._warming -= 1
        else:
            self._steps.append(_Step(seconds, parts, waited))

    def middle(self) -> _Step | None:
        """The step of which half of the others were faster; None where there is none yet."""
        return sorted(self._steps, key=lambda step: step.seconds)[(len(self._steps) - 1) // 2] if self._steps else None

    def document(self, device: torch.device) -> dict[str, Any]:
        """What `measured` of the result document has of it."""
        step = self.middle()
        if step is None:
            nothing = "step_seconds", "seconds_by_part", "seconds_by_kind", "waiting_seconds"
            return dict.fromkeys(nothing)
        told = device.type == "cpu"  # on CUDA the device waits, not the host
        return {
            "step_seconds": statistics.median(each.seconds for each in self._steps),
            "seconds_by_part": dict(step.parts),
            "seconds_by_kind": _kinds(step.seconds, step.waited) if told else None,
            "waiting_seconds": step.waited if told else None,
        }


OWN = "compute", "optimizer"
"""Parts of a predicted step in which its rank works; in all others it waits."""


def _waiting(breakdown: Mapping[str, float]) -> float:
    return sum(seconds for part, seconds in breakdown.items() if part not in OWN)


def _kinds(seconds: float, waiting: float) -> dict[str, float]:
    """What predicted and measured steps both tell: the planner's parts are those of a program, a run's are phases."""
    return {"working": max(0.0, seconds - waiting), "waiting": waiting}


def measured_memory(states: Mapping[str, int], memory: StepMemory, prediction: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes of the states by category (`Trainer.memory`), the peaks of allocator and process, the growth in the first
    steps (`peak`), and how much of the headline peak the prediction does not explain: of the process on a CPU, of the
    allocator on CUDA. prediction: its document, without what calibration expected."""
    found: dict[str, Any] = {}
    for kind, size in states.items():
        found[OF_STATE[kind]] = found.get(OF_STATE[kind], 0) + size
    predicted = prediction.get("memory_bytes") or {}
    found |= {
        "peak": memory.growth_in_first_steps,
        "allocator_peak": memory.allocator_peak(),
        "process_peak": memory.process_peak(),
    }
    if memory.device.type == "cpu":
        seen, said = found["process_peak"], predicted.get("process_peak")
        calibrated = (prediction.get("process_memory_bytes") or {}).get("unexplained", 0)
    else:
        seen, said, calibrated = found["allocator_peak"], predicted.get("peak"), 0
    found["unexplained"] = None if seen is None or said is None else seen - (said - calibrated)
    return found


def compared(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> str | None:
    """One line about the whole, for who watches."""
    parts = []
    before, after = predicted.get("step_seconds"), measured.get("step_seconds")
    if after is not None:
        beside = f" (predicted {_short(before)}, error {before / after - 1:+.1%})" if before else ""
        parts.append(f"{_short(after)} a step{beside}")
    said, seen = predicted.get("memory_bytes"), measured.get("memory_bytes")
    if seen and seen["allocator_peak"] is not None:  # CUDA: the device's memory is what runs out
        expected = f" (predicted {_bytes(_expected(said))})" if said else ""
        parts.append(f"tensors of rank 0 {_bytes(seen['allocator_peak'])}{expected}")
    elif seen and seen["process_peak"] is not None:
        wanted = said["process_peak"] if said else None
        error = f" (predicted {_bytes(wanted)}, error {wanted / seen['process_peak'] - 1:+.1%})" if wanted else ""
        parts.append(f"process memory of rank 0 {_bytes(seen['process_peak'])}{error}")
    if measured.get("sent_bytes_by_axis") is not None:
        parts.append(f"{_sent(measured['sent_bytes_by_axis'])} sent a step")
    return f"measured: {'; '.join(parts)}" if parts else None


def _expected(memory: Mapping[str, int]) -> int:
    """Of the allocator: the ledger's peak with what calibration expects beyond."""
    return memory["peak"] + memory["unexplained"]


def _short(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def _sent(axes: Mapping[str, int]) -> str:
    return f"{_bytes(sum(axes.values()))} ({_largest(axes)})" if axes else "nothing"


def _largest(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_bytes(size)}" for name, size in sorted(sizes.items(), key=lambda one: -one[1])[:3])


def _bytes(size: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:g} B"
