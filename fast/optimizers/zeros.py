"""Zeros: for gradients that are missing, and into gradients that are kept."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from twinstep.contract.tensors import drop_gradients

WHOLE = {2: torch.int16, 4: torch.int32}  # integers by their bytes


class ZeroGradients:
    """Zeros that stand in for missing gradients; kernels only read them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def like(self, param: Tensor) -> Tensor:
        """Return as many zeros as the parameter has elements, 1-D, in its dtype."""
        key = (param.dtype, param.device)
        kept = self._kept.get(key)
        if kept is None or kept.numel() < param.numel():
            kept = self._kept[key] = torch.zeros(param.numel(), dtype=key[0], device=key[1])
        return kept[: param.numel()]


@torch.no_grad()
def clear_gradients(params: Iterable[Tensor], *, set_to_none: bool) -> None:
    """Drop the gradients, or write zeros into all of them in few launches."""
    params = list(params)
    grads = [param.grad for param in params if param.grad is not None]
    if set_to_none or not all(grad.layout == torch.strided for grad in grads):
        drop_gradients(params, set_to_none=set_to_none)
        return
    for grad in grads:
        # With `create_graph` a gradient has a graph of its own. One that is a view has none, and
        # could not be detached in place.
        if grad.grad_fn is not None:
            grad.detach_()
        grad.requires_grad_(False)
    if grads:
        torch._foreach_zero_(grads)


@torch.no_grad()
def clear_where(grads: Sequence[Tensor], found: Tensor) -> None:
    """Write zeros into all gradients if something was found; few launches, and nothing waits.

    Args:
        grads: of 16 or 32 bits for each element.
        found: on their device, shape (); not 0 clears.
    """
    by_width: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        # As integers: NaN times 0 is 0, and times 1 the same NaN.
        by_width.setdefault(WHOLE[grad.element_size()], []).append(
            grad.detach().view(WHOLE[grad.element_size()])
        )
    keep = found == 0
    for dtype, words in by_width.items():
        torch._foreach_mul_(words, keep.to(dtype))
