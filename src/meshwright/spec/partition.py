"""The pipeline partition: the stages and FSDP units that each pipeline rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshwright.collectives.communicators import Communicator
from meshwright.layout import Layout
from meshwright.program.pipeline import PipelineProgram, Placement
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import ParameterTable
from meshwright.spec.stages import Stage, cut_into_stages, list_stage_units


@dataclass(frozen=True)
class Partition:
    """Partition of a model into pipeline stages, and their placement on ranks.

    table: the model's parameter table. stages: the stages in forward order. placement[replica][stage]: pipeline rank
    (index on axis pp) that holds the stage of this model copy; only bidirectional schedules have two copies.

    A rank may hold several stages (interleaving). Several ranks may hold the same stage (bidirectional schedules).
    Several stages may hold the same FSDP unit (a tied embedding is on the first and the last stage)."""

    table: ParameterTable
    stages: tuple[Stage, ...]
    placement: Placement

    @classmethod
    def of(cls, program: PipelineProgram, config: ModelConfig, table: ParameterTable, sequence: int) -> Partition:
        """Build the partition of a model for a pipeline program (each rank's order of forwards, backwards and
        transfers): the model is cut into as many stages as the program has, balanced in FLOPs, and each stage is placed
        where the program runs it.

        config: configuration of the model. table: its parameter table. sequence: tokens of a sequence.
        """
        return cls(table, cut_into_stages(config, program.stages, sequence), program.placement)

    @classmethod
    def whole(cls, table: ParameterTable) -> Partition:
        """Return the trivial partition: the whole model is one stage on one pipeline rank. table: the model's parameter
        table."""
        layers = sum(unit.startswith("layers.") for unit in table.units)
        return cls(table, (Stage(0, range(layers), first=True, last=True),), ((0,),))

    def stages_on(self, pp_rank: int) -> tuple[Stage, ...]:
        """Return the distinct stages that the pipeline rank `pp_rank` (index on axis pp) holds."""
        return tuple(stage for stage in self.stages if any(homes[stage.index] == pp_rank for homes in self.placement))

    def units(self, stage: Stage) -> tuple[str, ...]:
        """Return the names of the FSDP units (parameters that ZeRO-3 all-gathers together) of `stage`, in forward
        order."""
        return list_stage_units(self.table, stage)

    def needed_units(self, stage: Stage) -> tuple[str, ...]:
        """Return the names of the FSDP units whose parameters a stage reads, in the order of first use: its own units
        and, for a tied head, the embedding.
        """
        return tuple(dict.fromkeys(name for unit in self.units(stage) for name in self.table.needed_by(unit)))

    def units_on(self, pp_rank: int) -> tuple[str, ...]:
        """Return the names of the FSDP units that the pipeline rank `pp_rank` (index on axis pp) holds, in the order of
        the parameter table."""
        needed = {name for stage in self.stages_on(pp_rank) for name in self.needed_units(stage)}
        return tuple(unit for unit in self.table.units if unit in needed)

    @cached_property
    def _holders(self) -> dict[str, tuple[int, ...]]:
        """{name of an FSDP unit: pipeline ranks (indices on axis pp, ascending) that hold it}."""
        found: dict[str, set[int]] = {unit: set() for unit in self.table.units}
        for stage in self.stages:
            for unit in self.needed_units(stage):
                found[unit].update(homes[stage.index] for homes in self.placement)
        return {unit: tuple(sorted(places)) for unit, places in found.items()}

    def holders(self, unit: str) -> tuple[int, ...]:
        """Return the pipeline ranks (indices on axis pp, ascending) that hold the FSDP unit called `unit`."""
        return self._holders[unit]

    def shared_places(self) -> list[tuple[int, ...]]:
        """Return each set of several pipeline ranks that hold the same FSDP units, in the order of the parameter
        table."""
        return [places for places in dict.fromkeys(self._holders.values()) if len(places) > 1]

    def list_sub_axes(self, layout: Layout, pp_rank: int) -> dict[str, Communicator]:
        """Return {name: communicator} of the mesh's sub-axes of more than one rank over which a rank at `pp_rank` on
        axis pp sums gradients: consecutive ranks of tp or etp with the same values, such as "tp/2", and pipeline ranks
        with the same units, such as "pp[0,3]"."""
        stage = layout.tp * layout.cp * layout.dp
        found = {f"{axis}/{size}": Communicator(size, 1, "") for axis, size in self.table.list_partial_blocks(layout)}
        for places in self.shared_places():
            if pp_rank in places:
                name = f"pp[{','.join(map(str, places))}]"
                apart = "" if len(places) == layout.pp else name
                found[name] = Communicator(len(places), stage * (places[1] - places[0]), apart)
        return found
