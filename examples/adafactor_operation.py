"""Adafactor as a new operation: the second moment of a matrix is kept as its rows and columns.

parity check adafactor_operation.py
"""

import torch

from twinstep.parity import register, register_operation
from twinstep.parity.operations.arguments import GRADS, PARAMS
from twinstep.parity.operations.controls import BETA2, LR
from twinstep.parity.operations.operation import ListArgument, Operation, Role

EPS, LARGEST_UPDATE = 1e-30, 1.0


def matrix(shape):
    """True for what has rows and columns."""
    return len(shape) == 2


# A matrix has a row and a column of state, anything else a whole tensor: three unequal lists.
ROWS = ListArgument(
    name="rows", role=Role.SQUARE, shape=lambda shape: shape[:1] if matrix(shape) else None
)
COLUMNS = ListArgument(
    name="columns", role=Role.SQUARE, shape=lambda shape: shape[1:] if matrix(shape) else None
)
WHOLE = ListArgument(
    name="whole", role=Role.SQUARE, shape=lambda shape: None if matrix(shape) else shape
)


def adafactor_step(params, grads, rows, columns, whole, *, lr, beta2):
    """Mutates nothing; returns one entry for each written argument, in their order."""
    keep, add, lr = beta2.float(), (1 - beta2).float(), lr.float()
    left, new = (list(rows), list(columns), list(whole)), ([], [], [], [])
    for p, g in zip(params, grads, strict=True):
        g = g.float()
        square = g * g + EPS
        if matrix(p.shape):
            r = keep * left[0].pop(0) + add * square.mean(1)
            c = keep * left[1].pop(0) + add * square.mean(0)
            new[1].append(r)
            new[2].append(c)
            u = g / torch.sqrt((r / r.mean()).unsqueeze(1) * c.unsqueeze(0))
        else:
            v = keep * left[2].pop(0) + add * square
            new[3].append(v)
            u = g / torch.sqrt(v)
        if p.numel():
            rms = torch.sqrt((u * u).mean()) / LARGEST_UPDATE
            u = u / torch.maximum(rms, torch.ones_like(rms))
        new[0].append((p.float() - lr * u).to(p.dtype))
    return new


FP32, BF16 = (torch.float32,), (torch.bfloat16,)
STATE = {"rows": FP32, "columns": FP32, "whole": FP32}
register_operation(
    Operation(
        name="adafactor_step",
        summary="Adafactor: a factored second moment, updates of bounded size.",
        equations=(
            "matrix: r = beta2 r + (1 - beta2) mean of g^2 + 1e-30 over columns, c over rows",
            "        v = r c / mean(r)",
            "other:  v = beta2 v + (1 - beta2) (g^2 + 1e-30)",
            "u = g / sqrt(v);  p = p - lr u / max(1, rms(u))",
        ),
        lists=(PARAMS, GRADS, ROWS, COLUMNS, WHOLE),
        controls=(LR, BETA2),
        writes=("params", "rows", "columns", "whole"),
        reference=adafactor_step,
        combinations={
            "fp32": {"params": FP32, "grads": FP32, **STATE},
            "bf16": {"params": BF16, "grads": BF16, **STATE},
        },
        # The elements of a matrix belong together, and so do the three lists.
        laws=(
            "value", "nothing_else_written", "non_finite", "boundary_sizes", "alignment", "repeat",
            "process_state",
        ),
        whole_tensors=True,
    )
)  # fmt: skip


def adafactor(params, grads, rows, columns, whole, lr, beta2, clip):
    """In place, with reciprocal roots and products instead of quotients."""
    factored, other = iter(zip(rows, columns, strict=True)), iter(whole)
    for p, g in zip(params, grads, strict=True):
        g = g.float()
        square = g.square().add_(EPS)
        if matrix(p.shape):
            r, c = next(factored)
            r.lerp_(square.mean(1), 1 - beta2.item())
            c.mul_(beta2.item()).add_(square.sum(0) / p.shape[0], alpha=1 - beta2.item())
            u = g * (r / r.mean()).rsqrt()[:, None] * c.rsqrt()
        else:
            v = next(other).mul_(beta2.item()).add_(square, alpha=1 - beta2.item())
            u = g * v.rsqrt()
        if p.numel():
            u /= (clip(u) / LARGEST_UPDATE).clamp(min=1.0)
        p.copy_(p.float() - lr.float() * u)


@register("adafactor_step", name="right_adafactor")
def right_adafactor(params, grads, rows, columns, whole, *, lr, beta2):
    """Clips by the root of the mean square."""
    adafactor(params, grads, rows, columns, whole, lr, beta2, lambda u: u.square().mean().sqrt())


@register("adafactor_step", name="wrong_adafactor")
def wrong_adafactor(params, grads, rows, columns, whole, *, lr, beta2):
    """Clips by the norm, so that large tensors hardly move."""
    adafactor(params, grads, rows, columns, whole, lr, beta2, torch.Tensor.norm)
