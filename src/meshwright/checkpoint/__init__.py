"""Checkpoints: Hugging Face model directories that any layout writes and any layout reads.

Each name is imported when it is first asked for, so that reading a manifest does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.checkpoint.catalogue import CheckpointPath, find_best, find_checkpoint, find_newest
    from meshwright.checkpoint.checkpointer import Checkpointer
    from meshwright.checkpoint.manifest import DamagedCheckpoint, Manifest, read_manifest, verify_checkpoint
    from meshwright.checkpoint.settings import SaveOptions

_NAMES = {
    "catalogue": ("CheckpointPath", "find_best", "find_checkpoint", "find_newest"),
    "checkpointer": ("Checkpointer",),
    "manifest": ("DamagedCheckpoint", "Manifest", "read_manifest", "verify_checkpoint"),
    "settings": ("SaveOptions",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [
    "CheckpointPath", "Checkpointer", "DamagedCheckpoint", "Manifest", "SaveOptions", "find_best",
    "find_checkpoint", "find_newest", "read_manifest", "verify_checkpoint",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
