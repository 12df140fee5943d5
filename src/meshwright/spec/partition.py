"""Which stages of a model the ranks of a pipeline hold, and which units of the parameter table with them."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.program.pipeline import PipelineProgram, Placement
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import ParameterTable
from meshwright.spec.stages import Stage, stages_of, units_of


@dataclass(frozen=True, slots=True)
class Partition:
    """A model cut into stages, and where they are: `placement[replica][stage]` is a place on axis pp.

    A rank may hold several stages, the same stage several ranks (bidirectional schedules), and one unit several stages
    (a tied embedding is the first's and the last's).
    """

    table: ParameterTable
    stages: tuple[Stage, ...]
    placement: Placement

    @classmethod
    def of(cls, program: PipelineProgram, config: ModelConfig, table: ParameterTable, sequence: int) -> Partition:
        """The partition that a program of the layout asks for, balanced for rows of `sequence` tokens."""
        return cls(table, stages_of(config, program.stages, sequence), program.placement)

    @classmethod
    def whole(cls, table: ParameterTable) -> Partition:
        """Everything on one rank."""
        layers = sum(unit.startswith("layers.") for unit in table.units)
        return cls(table, (Stage(0, range(layers), first=True, last=True),), ((0,),))

    def held(self, place: int) -> tuple[Stage, ...]:
        """The stages at a place of pp, each once."""
        return tuple(stage for stage in self.stages if any(homes[stage.index] == place for homes in self.placement))

    def units(self, stage: Stage) -> tuple[str, ...]:
        """The units that a stage goes through, in forward order."""
        return units_of(self.table, stage)

    def needed(self, stage: Stage) -> tuple[str, ...]:
        """The units whose tensors it computes with, in the order of their first use."""
        return tuple(dict.fromkeys(name for unit in self.units(stage) for name in self.table.needed_by(unit)))

    def units_at(self, place: int) -> tuple[str, ...]:
        """The units that a place of pp holds, in the order of the table."""
        needed = {name for stage in self.held(place) for name in self.needed(stage)}
        return tuple(unit for unit in self.table.units if unit in needed)

    def holders(self, unit: str) -> tuple[int, ...]:
        """The places of pp that hold a unit."""
        places = {homes[stage.index] for homes in self.placement for stage in self.stages if unit in self.needed(stage)}
        return tuple(sorted(places))
