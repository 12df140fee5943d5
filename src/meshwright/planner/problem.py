"""Planning problem: a training step of a model on a cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.limits import shorten_repr
from meshwright.planner.cost.engines import ENGINES, Engine
from meshwright.planner.hardware.cluster import Cluster
from meshwright.spec.config import ModelConfig
from meshwright.spec.refuse import refuse
from meshwright.spec.teacher import TeacherWork


@dataclass(frozen=True, slots=True)
class Problem:
    """A planning problem: one training step of a model on a cluster.

    Attributes:
        config: Model.
        cluster: Devices and the links between them.
        sequence: Tokens of a sequence.
        batch: Sequences of a step over all ranks.
        engine: Training engine (framework) whose kernels and buffers are modelled.
        compile: True if layers are compiled by torch.compile.
        optimizer: Such as "adamw".
        precision: Such as "bf16".
        documents: Average number of documents packed into a sequence.
        pairs: True for training on response pairs (DPO), not next tokens.
        graphs: True if forward and backward of a step are one CUDA graph.
        teacher: Teacher model of distillation; None without.
        assumed: Line of text on what was assumed about the model, if anything.
        reserve: Bytes of a device to keep free.
        process: (name, bytes) of the memory that a rank's process on a CPU holds in addition to tensors.
    """

    config: ModelConfig
    cluster: Cluster
    sequence: int
    batch: int
    engine: Engine = ENGINES["meshwright"]
    compile: bool = False
    optimizer: str = "adamw"
    precision: str = "bf16"
    documents: float = 1.0
    pairs: bool = False
    graphs: bool = False
    teacher: TeacherWork | None = None
    assumed: str | None = None
    reserve: float = 0.0
    process: tuple[tuple[str, int], ...] = ()

    @property
    def usable_bytes(self) -> float:
        """Bytes of a device's memory that a layout may use: all but the reserve."""
        return self.cluster.device.memory_bytes - self.reserve

    @property
    def only_planned(self) -> bool:
        """True if the search includes layouts that `meshwright train` cannot run: for models, engines and precisions
        that can only be planned, for encoders, and for sequences longer than the positions that the model was made for.
        """
        config, runs = self.config, self.engine.name == "meshwright" and self.precision != "fp8"
        return not runs or config.planning_only is not None or config.encoder or self.sequence > config.max_positions

    def accepts(self, layout: Layout) -> bool:
        """Return True if training accepts the layout. In a problem that can only be planned, return True if the layout
        is possible for the model."""
        try:
            self.refuse(layout, planning=self.only_planned)
        except UserError:
            return False
        return True

    def refuse(self, layout: Layout, devices: int | None = None, *, planning: bool) -> None:
        """Raise `UserError` with the reason if the layout is infeasible for the model or for the teacher of its
        distillation. devices: number that the layout must have; None: any; planning: see the function `refuse`."""
        refuse(layout, self.config, self.batch, self.sequence, devices, planning=planning)
        if self.teacher is not None:
            self.teacher.refuse(layout, self.batch, self.sequence)


def parse_reserve(value: str | float, device_bytes: float) -> float:
    """Return the bytes of a device to keep free. value: a fraction of its memory, `0.1`, or a size, `"8GiB"`;
    device_bytes: its memory. Raises `UserError` for anything else, and if nothing would be left."""
    match = re.fullmatch(r"\s*((?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)\s*(GiB|MiB)?\s*", str(value))
    size = float(match[1]) * {"GiB": 2.0**30, "MiB": 2.0**20, None: device_bytes}[match[2]] if match else device_bytes
    if not size < device_bytes:
        raise UserError(
            "reserve: takes a fraction below 1, such as 0.1, or a size below the device's "
            f'{device_bytes / 2**30:.1f} GiB in GiB or MiB, such as "8GiB", not {shorten_repr(value)}'
        )
    return size


class StageCandidate(NamedTuple):
    """A candidate layout of one pipeline stage; the number of stages is left open. layout: sizes of tp, cp, ep and
    other axes; its dp is only as large as expert parallelism needs. rows: sequences of a micro-batch."""

    layout: Layout
    rows: int
