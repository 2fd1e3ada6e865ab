"""Muon as a new operation: orthogonalised momentum; bounded, with matrix products.

parity check muon_operation.py
"""

import torch

from twinstep.parity import register, register_operation
from twinstep.parity.operations.controls import LR, MOMENTUM
from twinstep.parity.operations.operation import ListArgument, Operation, Option, Role
from twinstep.reference.norm import l2_norm

A, B, C = 3.4445, -4.775, 2.0315


def fp32(x):
    """Formed in float64, rounded once."""
    return x.to(torch.float32)


def newton_schulz(m, iterations):
    """Drives the singular values of a matrix towards 1; a vector is a matrix of one row.

    A tall matrix is transposed on the way, so that the product with itself is small.
    """
    x = m if m.dim() == 2 else m.unsqueeze(0)
    tall = x.shape[0] > x.shape[1]
    x = (x.t() if tall else x) / (l2_norm([m]) + 1e-7)
    for _ in range(iterations):
        gram = torch.mm(x, x.t())
        x = A * x + torch.mm(B * gram + C * torch.mm(gram, gram), x)
    x = x.t() if tall else x
    return x if m.dim() == 2 else x.squeeze(0)


def muon_step(params, grads, momentums, *, lr, momentum, iterations):
    """Mutates nothing; returns one entry for each written argument, in their order."""
    new = [fp32(momentum) * m + fp32(g) for m, g in zip(momentums, grads, strict=True)]
    moved = [newton_schulz(m, iterations) for m in new]
    out = [(fp32(p) - fp32(lr) * o).to(p.dtype) for p, o in zip(params, moved, strict=True)]
    return out, new


FP32, BF16 = (torch.float32,), (torch.bfloat16,)
register_operation(
    Operation(
        name="muon_step",
        summary="Muon: an orthogonalised momentum.",
        equations=(
            "m = momentum m + g",
            "x = m / (norm(m) + 1e-7); iterations times: x = a x + (b x x' + c (x x')^2) x",
            "p = p - lr x",
        ),
        lists=(
            ListArgument(name="params", role=Role.PARAM),
            ListArgument(name="grads", role=Role.GRAD),
            ListArgument(name="momentums", role=Role.MOMENT),
        ),
        controls=(LR, MOMENTUM),
        options=(Option(name="iterations", choices=(1, 2, 0)),),
        writes=("params", "momentums"),
        reference=muon_step,
        combinations={
            "fp32": {"params": FP32, "grads": FP32, "momentums": FP32},
            "bf16": {"params": BF16, "grads": BF16, "momentums": FP32},
        },
        dims=(1, 2),
        # The elements of a matrix belong together: cutting a tensor in two changes the result.
        laws=("value", "nothing_else_written", "non_finite", "boundary_sizes", "repeat"),
    )
)


def muon(params, grads, momentums, lr, momentum, iterations, b):
    """In place, with fused additions and the product on the other side."""
    for p, g, m in zip(params, grads, momentums, strict=True):
        m.mul_(momentum.float()).add_(g.float())
        x = m.reshape(m.shape if m.dim() == 2 else (1, -1))
        tall = x.shape[0] > x.shape[1]
        x = (x.T if tall else x) / (m.double().norm().float() + 1e-7)
        for _ in range(iterations):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=C), x, beta=A)
        p.copy_((p.float() - lr.float() * (x.T if tall else x).reshape(m.shape)).to(p.dtype))


@register("muon_step", name="right_muon", dtypes=("fp32", "bf16"))
def right_muon(params, grads, momentums, *, lr, momentum, iterations):
    """Another order of operations, within the bound."""
    muon(params, grads, momentums, lr, momentum, iterations, B)


@register("muon_step", name="wrong_muon", dtypes=("fp32", "bf16"))
def wrong_muon(params, grads, momentums, *, lr, momentum, iterations):
    """One coefficient off in the fourth digit."""
    muon(params, grads, momentums, lr, momentum, iterations, -4.776)
