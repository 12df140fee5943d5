"""CPU kernels of the serving engine: a compiled library per instruction set, built once, called through ctypes; and for
a GPU `triton_kernels.py`, which only its runner imports. Torch-free.

Every output element is one fixed sequence of operations on its own row: its bits depend neither on the number of rows,
nor on the tile a row falls into, nor on the number of threads.
"""

from meshwright.kernels.choice import choose_instruction_set, load_kernels
from meshwright.kernels.library import Kernels
from meshwright.kernels.op_list import OpList
from meshwright.kernels.operations import (
    Activation,
    Attention,
    Embed,
    Experts,
    ExpertsWorkspace,
    Gate,
    LayerCache,
    Linear,
    Norm,
    RopeStore,
    StepArrays,
    TakeRows,
)
from meshwright.kernels.structures import PackedMatrix

__all__ = [
    "load_kernels",
    "choose_instruction_set",
    "Kernels",
    "PackedMatrix",
    "OpList",
    "StepArrays",
    "LayerCache",
    "ExpertsWorkspace",
    "Embed",
    "Norm",
    "Linear",
    "RopeStore",
    "Attention",
    "Activation",
    "Experts",
    "Gate",
    "TakeRows",
]
