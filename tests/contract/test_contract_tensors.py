"""Gradients that have a graph of their own are zeroed all the same; state lies in memory."""

from __future__ import annotations

import pytest
import torch

from twinstep.contract.tensors import check_in_memory, drop_gradients


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_with_a_graph_is_dropped_or_zeroed(set_to_none: bool) -> None:
    param = torch.nn.Parameter(torch.tensor([2.0]))
    (grad,) = torch.autograd.grad((param**3).sum(), [param], create_graph=True)
    param.grad = grad
    assert grad.grad_fn is not None
    drop_gradients([param], set_to_none=set_to_none)
    if set_to_none:
        assert param.grad is None
    else:
        assert param.grad is grad
        assert param.grad.item() == 0.0
        assert not param.grad.requires_grad


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.ones(2).to_sparse(), "torch.sparse_coo"),
        (torch.ones(2, device="meta"), "on the meta device"),
    ],
)
def test_elements_must_lie_in_memory(tensor: torch.Tensor, kind: str) -> None:
    with pytest.raises(ValueError, match=f"x is {kind}, but should hold its elements in memory"):
        check_in_memory(tensor, "x", "here")
    check_in_memory(torch.ones(2), "x", "here")
