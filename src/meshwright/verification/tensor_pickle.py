"""Pickle of results that hold many tensors, which a rank sends to the process that compares them."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


def pickle_with_tensors(value: Any) -> bytes:
    """Return the pickle of any value, for `pickle.loads`. CPU tensors in the value are pickled as NumPy arrays, which
    takes a seventh of the time of torch's format; tensors that NumPy cannot represent (bfloat16) keep torch's format.
    Tensors that share storage are separate after `pickle.loads`."""
    buffer = io.BytesIO()
    _TensorPickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


class _TensorPickler(pickle.Pickler):
    """Pickler that pickles CPU tensors as NumPy arrays."""

    def reducer_override(self, value: Any) -> Any:
        """Return the reduction of `value` for pickle, (function, arguments), if it is a tensor. Return NotImplemented
        for other objects, which are pickled as usual."""
        if type(value) is not torch.Tensor:
            return NotImplemented
        try:
            return torch.from_numpy, (value.numpy(),)
        except (TypeError, RuntimeError):  # a dtype or device that NumPy does not have, or a tensor with a gradient
            return NotImplemented
