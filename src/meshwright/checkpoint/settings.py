"""Settings of a run's checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.checkpoint.model_files import SHARD_BYTES, ModelFiles
from meshwright.spec.parameters import ParameterTable


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """Settings of all checkpoint saves of a run.

    dtype: dtype of the exported model weights ("float32", "bfloat16"). keep: number of newest checkpoints to retain.
    keep_best: True to retain the checkpoint with the lowest validation loss too. background: True to write in a thread
    while training continues. tokenizer_directory: directory of tokenizer files to include in each checkpoint; None: no
    tokenizer. shard_bytes: maximum tensor bytes per model file. timeout_seconds: maximum time that a save waits for
    other ranks.
    """

    dtype: str = "float32"
    keep: int = 2
    keep_best: bool = True
    background: bool = True
    tokenizer_directory: Path | None = None
    shard_bytes: int = SHARD_BYTES
    timeout_seconds: float = 1800.0


@dataclass(frozen=True, slots=True)
class SaveTarget:
    """Destination and shared settings of all saves of a run, on one rank.

    directory: the run's checkpoints/. rank, ranks: number of this rank, and number of ranks. table: the model's
    parameter table. files: plan of the model files. small_files: file name -> content of configuration and tokenizer
    files. options: settings. log: called with lines for the user. outcomes: on rank 0, save id -> "done" or the error
    of each save so far.
    """

    directory: Path
    rank: int
    ranks: int
    table: ParameterTable
    files: ModelFiles
    small_files: Mapping[str, bytes]
    options: SaveOptions
    log: Callable[[str], None]
    outcomes: dict[str, str] = field(default_factory=dict)
