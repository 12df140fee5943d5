"""Pass that adds explicit sends and receives to a pipeline schedule; generators omit them."""

from __future__ import annotations

import numpy as np

from meshwright.program.pipeline import Kind, PipelineProgram, build_program
from meshwright.program.simulate_pipeline import Durations, analyze_program, simulate_pipeline


def with_transfers(program: PipelineProgram, durations: Durations | None = None) -> PipelineProgram:
    """Return the pipeline schedule with a send and a receive step added for every activation and gradient that crosses
    ranks, in an order that cannot deadlock even with synchronous sends.

    durations: step durations for the simulation that orders the steps (None: 1 for each forward, input gradient and
    weight gradient of a rank). A program with sends and receives is returned unchanged. Raises ProgramError for a
    program that deadlocks.

    All compute steps and transfers are sorted by simulated time: a step by its start, a transfer by the time at which
    its value is produced. A send and its receive take this position on both ranks, so that the first pending transfer
    can always complete. Transfers of a rank without computation between them form one group, posted at once. In
    simulation no compute step starts later than without explicit transfers: a value is sent as soon as it is produced,
    and its receive is posted before the value is needed."""
    if program.has_transfers:
        return program
    s = program.steps
    timing = simulate_pipeline(program, durations or Durations.per_rank(program))
    _, wait = analyze_program(program)
    turn = np.empty(len(s.group_rank))
    turn[timing.order] = np.arange(len(timing.order))
    turn = turn[s.group_index]  # where times are equal: after all that a step waits for

    # Columns: time, turn, 0 for the transfers before 1 for a computation; a transfer comes right after its maker.
    forward = s.kind[wait.maker] == Kind.FORWARD
    made = (timing.end[wait.maker], turn[wait.maker] + 0.5)
    sends = np.where(forward, Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
    receives = np.where(forward, Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)
    steps = np.concatenate([np.arange(len(s)), wait.maker, wait.reader])
    kind = np.concatenate([s.kind, sends, receives])
    time = np.concatenate([timing.start, made[0], made[0]])
    place = np.concatenate([turn, made[1], made[1]])
    order = np.lexsort((place, time, s.rank[steps]))
    steps, kind, is_transfer = steps[order], kind[order], (np.arange(len(kind)) >= len(s))[order]

    # Transfers of one rank that follow each other share a group; computation keeps its own.
    group = np.where(is_transfer, -1, s.group_index[steps])
    rank, component = s.rank[steps], np.where(is_transfer, 0, s.component[steps])
    columns = (rank, group, kind, s.stage[steps], s.replica[steps], s.micro_batch[steps], component)
    return build_program(
        program.name, program.ranks, program.micro_batches, program.placement, np.stack(columns, axis=1)
    )
