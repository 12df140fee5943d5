"""Estimated durations of a model's pipeline stages, and the pipeline program of a layout and a model, which the `auto`
schedule finds with these durations. All users call `program_for`, so that they get the same program."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.layout import Layout
from meshwright.program.durations import Durations
from meshwright.program.pipeline import PipelineProgram
from meshwright.schedules.library import generate_for_layout
from meshwright.spec.config import ModelConfig
from meshwright.spec.stages import cut_into_stages
from meshwright.spec.work import ATTENTION_CORE, RECOMPUTED, head_flops, layer_flops

_PARTS = 1024
"""Times are multiples of 1 / 1024 of a rank's mean forward time: sums are exact, so that ranks on different processors
find the same program."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Estimator of the durations of a model's pipeline stages (forward, input-gradient and weight-gradient passes) from
    FLOPs, for schedules. Calling an object with a number of stages returns their durations.

    A weight matmul costs the same in forward, input gradient and weight gradient. The attention core (scores and
    weighted values) has no weights; its backward, twice the forward FLOPs, counts as input gradient. Recomputation and
    both gradients of the head also count as input gradient. Communication and memory bandwidth are left out.

    Attributes:
        config: Configuration of the model.
        ranks: Number of pipeline ranks.
        sequence: Tokens of a sequence.
        recompute: Activation checkpointing ("none", "selective" or "full")."""

    config: ModelConfig
    ranks: int
    sequence: int
    recompute: str = "none"

    @classmethod
    def of(cls, layout: Layout, config: ModelConfig, sequence: int) -> StageTimes:
        """Return the estimator for a layout, a model and sequences of `sequence` tokens."""
        return cls(config, layout.pp, sequence, layout.recompute)

    def __call__(self, count: int) -> Durations | None:
        """Return the estimated durations of the forward, input-gradient and weight-gradient passes of each of the
        `count` stages into which the model is cut, in units of a pipeline rank's mean forward time per micro-batch;
        None if the model has fewer layers than stages."""
        if count > self.config.layers:
            return None
        forward, input_gradient, weight_gradient = [0.0] * count, [0.0] * count, [0.0] * count
        for stage in cut_into_stages(self.config, count, self.sequence):
            at = stage.index
            for layer in stage.layers:
                flops = layer_flops(self.config, layer, self.sequence)
                whole, core = sum(flops.values()), sum(flops[name] for name in ATTENTION_CORE)
                again = sum(flops.get(name, 0.0) for name in RECOMPUTED[self.recompute])
                forward[at] += whole
                input_gradient[at] += whole + core + again
                weight_gradient[at] += whole - core
            if stage.last:
                forward[at] += head_flops(self.config, self.sequence)
                input_gradient[at] += 2 * head_flops(self.config, self.sequence)
        part = sum(forward) / self.ranks / _PARTS
        kinds = (forward, input_gradient, weight_gradient)
        return Durations(*([round(time / part) / _PARTS for time in times] for times in kinds))


def program_for(layout: Layout, config: ModelConfig, sequence: int) -> PipelineProgram:
    """Return the pipeline program (each rank's order of forwards, backwards and transfers) of a layout's schedule, for
    the model with configuration `config` and sequences of `sequence` tokens. Raises `UserError` if the schedule does
    not support the layout's numbers (such as stages or micro-batches), and for a schedule file that does not describe
    exactly one synchronous training step."""
    return generate_for_layout(layout, StageTimes.of(layout, config, sequence))
