"""The parallelism of a model in one place: the operations along each axis of a mesh that it is built with."""

from __future__ import annotations

from meshwright.comm.mesh import Mesh
from meshwright.model.axis_operations import AxisOperations
from meshwright.parallel.context import make_context_operations
from meshwright.parallel.expert import AllToAllTokenDispatcher
from meshwright.parallel.recompute import ActivationCheckpointing
from meshwright.parallel.tensor import TensorParallel


def build_axes(mesh: Mesh) -> AxisOperations:
    """Build the operations through which this rank's model communicates (tensor, context and expert parallelism) and
    recomputes activations, as `mesh.layout` selects. Data and pipeline parallelism act from outside the model
    (`parallel/zero_engine.py`, `parallel/pipeline.py`).
    """
    layout = mesh.layout
    return AxisOperations(
        tensor=TensorParallel(mesh.tp, layout.tensor_sequence_parallel),
        context=make_context_operations(mesh),
        dispatcher=AllToAllTokenDispatcher(mesh.ep, mesh.etp) if layout.expert_parallel else None,
        recompute=ActivationCheckpointing(layout.recompute),
    )
