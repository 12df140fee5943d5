"""Any torch.nn.Module in the training loop: data-parallel, ZeRO, checkpoints and resume as for Meshwright's own models.

A script calls `fit` with a function that builds its module, a loss and its data. It is started as `meshwright run
--ranks N script.py`, by torchrun or SLURM, or by itself on one rank.
"""

from __future__ import annotations

from meshwright.training.module.fit import fit, load
from meshwright.training.script import exit_codes

__all__ = ["exit_codes", "fit", "load"]
