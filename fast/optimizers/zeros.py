"""Zeros for gradients that are missing."""

import torch
from torch import Tensor


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
