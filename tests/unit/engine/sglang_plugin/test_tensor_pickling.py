"""Tensors travel between SGLang's processes as arrays, and arrive as they were."""

import copyreg
import io
import pickle
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing

from services.rollout.engine.sglang_plugin import tensor_pickling

TENSORS = [
    torch.arange(6, dtype=torch.int64).reshape(2, 3),
    torch.linspace(0, 1, 24).reshape(4, 6).T[1:],
    torch.tensor(7.5, dtype=torch.float64),
    torch.empty(0, 3),
    torch.tensor([True, False]),
    torch.linspace(0, 1, 5).to(torch.bfloat16),
    torch.ones(2, requires_grad=True),
]


@pytest.fixture
def registered() -> Iterator[None]:
    """As in SGLang's processes, for the test only."""
    before = dict(copyreg.dispatch_table)
    tensor_pickling.register()
    yield
    copyreg.dispatch_table.clear()
    copyreg.dispatch_table.update(before)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}")
def test_a_tensor_arrives_as_it_was(tensor: torch.Tensor) -> None:
    """Also a view, one of a kind that numpy lacks, and one with a gradient; it may be changed where it arrives."""
    read = pickle.loads(pickle.dumps(tensor, pickle.HIGHEST_PROTOCOL))
    assert torch.equal(read, tensor)
    assert (read.dtype, read.requires_grad) == (tensor.dtype, tensor.requires_grad)
    read.detach().zero_()


@pytest.mark.usefixtures("registered")
def test_patches_travel_as_an_array_and_parameters_as_before() -> None:
    """Only plain tensors; and a view takes its own bytes, not those of what it was cut from."""
    patches = torch.zeros(1000, 8)[:10]
    assert len(pickle.dumps(patches, pickle.HIGHEST_PROTOCOL)) < 1000
    assert type(pickle.loads(pickle.dumps(torch.nn.Parameter(patches)))) is torch.nn.Parameter
    shared = ForkingPickler(io.BytesIO()).dispatch_table
    assert shared[torch.Tensor] is not tensor_pickling.reduce_tensor, "tensors in shared memory are shared as before"
