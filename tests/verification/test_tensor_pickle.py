"""Results with tensors return from a process as they were."""

from __future__ import annotations

import pickle
import pickletools

import pytest
import torch

from meshwright.verification.tensor_pickle import pickle_with_tensors

TENSORS = {
    "float64": torch.tensor([1.5, float("nan"), -float("inf")], dtype=torch.float64),
    "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "boolean": torch.tensor([[True], [False]]),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "with gradient": torch.ones(2, requires_grad=True),
    "conjugated": torch.tensor([1 + 2j]).conj(),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "meta": torch.empty(2, device="meta"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensor_returns_as_it_was(name: str):
    tensor = TENSORS[name]
    found = pickle.loads(pickle_with_tensors({"a": [tensor, name]}))["a"]
    assert found[1] == name and type(found[0]) is type(tensor)
    assert found[0].requires_grad == tensor.requires_grad and found[0].device == tensor.device
    if tensor.device.type != "meta":
        assert found[0].dtype == tensor.dtype
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        torch.testing.assert_close(found[0].to(wide), tensor.to(wide), rtol=0, atol=0, equal_nan=True)
        found[0].detach().copy_(tensor.detach())  # writable


def test_part_of_a_tensor_is_sent_without_the_rest():
    assert len(pickle_with_tensors(torch.zeros(100_000)[:10])) < 1000


def test_ordinary_tensors_do_not_take_torch_format():
    names = [argument for _, argument, _ in pickletools.genops(pickle_with_tensors(TENSORS["float64"]))]
    assert "from_numpy" in names and "_load_from_bytes" not in names
