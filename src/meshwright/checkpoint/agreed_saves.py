"""Collective calls by which all ranks learn whether the checkpoint save in progress has ended or failed on any of them.

Ranks exchange their states by small all-reduces, not files: a rank whose disk is full could not write a file that
reports its failure, and the others would wait for its checkpoint shard.
"""

from __future__ import annotations

import time

from meshwright.checkpoint.agreement import Agreement
from meshwright.checkpoint.checkpointer import Checkpointer


def wait_for_save(checkpointer: Checkpointer, agreement: Agreement) -> str | None:
    """Wait until no rank is saving a checkpoint; return the reason if the save failed on any rank, else None.
    Collective. checkpointer: this rank's part of the save; agreement: collective calls over all ranks."""
    while True:
        busy = checkpointer.busy  # read before `failed`: a save that has ended has set its outcome
        if not agreement.all_true(checkpointer.failed() is None):
            return abandon_save(checkpointer, agreement)
        if agreement.all_true(not busy):
            checkpointer.wait()  # reports the stall of the save, which has ended
            return None
        time.sleep(0.02)


def abandon_save(checkpointer: Checkpointer, agreement: Agreement) -> str:
    """Cancel a checkpoint save on all ranks after it failed on one of them, and return the reason. Older checkpoints
    are retained. Collective. checkpointer: this rank's part of the save; agreement: collective calls over all ranks."""
    failure = agreement.broadcast_first_text(checkpointer.failed())
    checkpointer.abandon()
    return failure[1] if failure else "the checkpoint could not be written"
