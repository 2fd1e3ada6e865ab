"""How other projects decide that a kernel is right: their comparison rules, written anew.

A rule gets what a kernel left and what the reference leaves, as pairs of float64 tensors, and says
whether it is content. Which tensors a project looks at belongs to its rule: some compare weights
and no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pair:
    """One written tensor: its argument, its dtype, what there is and what should be (float64)."""

    name: str
    dtype: torch.dtype
    got: Tensor
    want: Tensor


Accepts = Callable[[Pair], bool]


@dataclass(frozen=True)
class Elsewhere:
    """A rule of another project.

    Attributes:
        says: the rule in a few words.
        source: project and file.
        accepts: whether it is content with one tensor.
        weights_only: it looks at the weights alone where an operation has some.
        curves: it compares losses over a short training, not tensors.
    """

    says: str
    source: str
    accepts: Accepts
    weights_only: bool = False
    curves: bool = False

    def content(self, pairs: Sequence[Pair]) -> bool:
        """Whether the rule is content with everything it looks at."""
        seen = [pair for pair in pairs if not self.weights_only or pair.name == "params"]
        return all(self.accepts(pair) for pair in (seen or pairs))


def norms(pair: Pair) -> bool:
    """Norms within one per cent of each other."""
    got, want = pair.got.norm(), pair.want.norm()
    return bool((got - want).abs() <= 0.01 * want)


def close(rtol: float, atol: float, equal_nan: bool = False) -> Accepts:
    """`torch.allclose` with these tolerances."""
    return lambda pair: torch.allclose(pair.got, pair.want, rtol, atol, equal_nan)


def by_dtype(
    wide: tuple[float, float], half: tuple[float, float], bf16: tuple[float, float]
) -> Accepts:
    """`torch.allclose` with (rtol, atol) by the dtype of the tensor."""
    known = {torch.float16: half, torch.bfloat16: bf16}
    return lambda pair: close(*known.get(pair.dtype, wide))(pair)


def close_by_dtype(pair: Pair) -> bool:
    """`torch.testing.assert_close` with its defaults for the tensor's dtype."""
    got, want = pair.got.to(pair.dtype), pair.want.to(pair.dtype)
    try:
        torch.testing.assert_close(got, want, equal_nan=True)
    except AssertionError:
        return False
    return True


def both_errors(pair: Pair) -> bool:
    """Wrong only where absolute and relative error both exceed one per cent."""
    error = (pair.got - pair.want).abs()
    wrong = (error > 1e-2) & (error / pair.want.abs() > 1e-2)
    return not bool(wrong.any())


def root_mean_square(pair: Pair) -> bool:
    """Root of the mean squared error at most 0.005 of the mean square."""
    error = (pair.got - pair.want).square().mean().sqrt()
    return bool(error / (pair.want.square().mean().sqrt() + 1e-8) < 0.005)


def running_maximum(pair: Pair) -> bool:
    """Largest absolute error 1e-3 and relative error 1, kept by `>`, which NaN never is."""
    worst = relative = 0.0
    for got, want in zip(
        pair.got.reshape(-1).tolist(), pair.want.reshape(-1).tolist(), strict=True
    ):
        error = abs(got - want)
        worst = error if error > worst else worst
        ratio = error / abs(want) if want else 0.0
        relative = ratio if ratio > relative else relative
    return worst <= 1e-3 and relative <= 1.0


def beyond(pair: Pair) -> bool:
    """No |difference| beyond 1e-4 plus an epsilon of the value: a test that NaN never meets."""
    error = (pair.got - pair.want).abs()
    return not bool((error > 1e-4 + pair.want.abs() * 2.0**-23).any())


def most(pair: Pair) -> bool:
    """All but one per cent of the elements within 1e-5 and 1e-6."""
    right = torch.isclose(pair.got, pair.want, 1e-5, 1e-6)
    return bool((~right).double().mean() <= 0.01) if right.numel() else True


def largest(pair: Pair) -> bool:
    """Largest absolute error at most 1e-3."""
    return not pair.got.numel() or bool((pair.got - pair.want).abs().max() <= 1e-3)


def cosine(pair: Pair) -> bool:
    """Cosine of the angle between the two above 0.99."""
    one, two = pair.got.reshape(-1), pair.want.reshape(-1)
    return bool(torch.nn.functional.cosine_similarity(one, two, dim=0) > 0.99) or torch.equal(
        one, two
    )


def similar(pair: Pair) -> bool:
    """1 - 2<x, y> / (<x, x> + <y, y>) below 1e-3."""
    one, two = pair.got.reshape(-1), pair.want.reshape(-1)
    total = (one * one + two * two).sum()
    return bool(1 - 2 * (one * two).sum() / total < 1e-3) or torch.equal(one, two)


def curve(pair: Pair) -> bool:
    """Every loss of the run within one per cent."""
    return bool(((pair.got - pair.want).abs() <= 0.01 * pair.want.abs()).all())


RULES = (
    Elsewhere(
        "norm of the weights within 1 %",
        "deepspeedai/DeepSpeed tests/unit/ops/adam/test_cpu_adam.py",
        norms,
        weights_only=True,
    ),
    Elsewhere(
        "allclose, rtol = atol = 1e-2, NaN equal",
        "meta-pytorch/BackendBench BackendBench/eval.py",
        close(1e-2, 1e-2, True),
    ),
    Elsewhere(
        "absolute and relative error both above 1e-2",
        "flashinfer-ai/flashinfer-bench bench/utils.py",
        both_errors,
    ),
    Elsewhere("cosine similarity above 0.99", "no one project; common in scripts", cosine),
    Elsewhere("similarity within 1e-3", "deepseek-ai/DeepGEMM (calc_diff)", similar),
    Elsewhere(
        "root mean square error below 0.005",
        "fla-org/flash-linear-attention fla/utils/_testing.py",
        root_mean_square,
    ),
    Elsewhere(
        "largest error 1e-3, relative 1, running maximum",
        "NVIDIA/apex tests/L0/run_optimizers/test_fused_optimizer.py",
        running_maximum,
        weights_only=True,
    ),
    Elsewhere("largest error 1e-3", "no one project; common in scripts", largest),
    Elsewhere("error beyond 1e-4 + |x| eps", "karpathy/llm.c dev/cuda", beyond),
    Elsewhere(
        "allclose, 1e-4 in fp32 and 1e-2 in 16 bits",
        "ScalingIntelligence/KernelBench src/kernelbench/eval.py",
        by_dtype((1e-4, 1e-4), (1e-2, 1e-2), (1e-2, 1e-2)),
    ),
    Elsewhere("allclose, rtol 1e-5, atol 1e-8", "torch.allclose as it comes", close(1e-5, 1e-8)),
    Elsewhere(
        "1e-5 and 1e-6, one per cent may be wrong",
        "warner-benjamin/optimi tests/config.py",
        most,
        weights_only=True,
    ),
    Elsewhere(
        "torch.testing.assert_close as it comes, weights and state",
        "pytorch/pytorch test/test_optim.py, meta-pytorch/tritonbench",
        close_by_dtype,
    ),
    Elsewhere(
        "losses of 32 steps within 1 %",
        "linkedin/Liger-Kernel test/convergence",
        curve,
        curves=True,
    ),
)
