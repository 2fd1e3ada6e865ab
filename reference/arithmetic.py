"""The few arithmetic rules that every reference file obeys.

All arithmetic is IEEE 754, round to nearest even, one rounding per written operation. Scalars are
formed in float64 and rounded once to fp32; tensors go to fp32 before they meet one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from twinstep.contract.hyper import Number


def fp32(x: Tensor) -> Tensor:
    """Round x once to fp32 (exact for fp16 and bf16).

    Args:
        x: any shape, any floating dtype.
    """
    return x.to(torch.float32)


def fp64(x: Tensor) -> Tensor:
    """Widen x to float64 (exact for every dtype used here)."""
    return x.to(torch.float64)


def float64(x: float) -> Tensor:
    """A Python number as a scalar: float64, shape ()."""
    return torch.tensor(x, dtype=torch.float64)


def one_minus(x: Tensor) -> Tensor:
    """1 - x, formed in float64 and rounded once to fp32.

    Args:
        x: a float64 scalar, shape ().

    In fp32, 1 - 0.999 would keep only 14 correct bits: the subtraction cancels ten of them. Tensors
    of other types may take over the whole function, as they may `bias_correction_of`.
    """
    if has_torch_function_unary(x):
        result: Tensor = handle_torch_function(one_minus, (x,), x)
        return result
    return fp32(1.0 - fp64(x))


def power(base: Tensor, exponent: int) -> Tensor:
    """Raise base to exponent in float64 by square-and-multiply, lowest bit first.

    The order of multiplications is part of the definition: another order gives other last bits.

    Args:
        base: shape ().
        exponent: an integer, at least 0.

    Raises:
        ValueError: the exponent is negative.
    """
    if exponent < 0:
        raise ValueError(f"exponent={exponent}, but should be at least 0 [power]")
    square = fp64(base)
    result = torch.ones_like(square)
    while exponent:
        if exponent & 1:
            result = result * square
        square = square * square
        exponent >>= 1
    return result


def bias_correction_of(beta: Tensor, t: int) -> Tensor:
    """1 - beta^t, formed in float64 and rounded once to fp32.

    Args:
        beta: a float64 scalar, shape ().
        t: number of this step, counted from 1.
    """
    if has_torch_function_unary(beta):
        result: Tensor = handle_torch_function(bias_correction_of, (beta,), beta, t)
        return result
    return one_minus(power(beta, t))


def sqrt_rn(x: Tensor) -> Tensor:
    """Square root of fp32 values, correctly rounded.

    torch's fp32 square root on the CPU can be 1 ULP off, so the root is taken in float64 and
    rounded once. No root of an fp32 number comes within four float64 ULP of the middle between
    two fp32 numbers, so even a float64 root that is 1 ULP off rounds to the right result.

    Args:
        x: fp32, any shape. Negative gives NaN, -0.0 stays -0.0.
    """
    return fp32(torch.sqrt(fp64(x)))


def control(value: Number, device: torch.device) -> Tensor:
    """A hyper-parameter as a control: float64, shape (), on the data's device.

    A tensor keeps the value that it holds: lr = 0.1 in fp32 is not 0.1 in float64. On a GPU the
    control must lie on the GPU too: torch divides a CUDA tensor by a CPU scalar by multiplying
    with the reciprocal, which rounds twice.
    """
    if isinstance(value, Tensor):
        return value.detach().to(device=device, dtype=torch.float64).reshape(())
    return torch.tensor(value, dtype=torch.float64, device=device)
