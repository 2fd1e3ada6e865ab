"""Distance between floating-point numbers in units in the last place, and their bits in print."""

from __future__ import annotations

import torch
from torch import Tensor

from twinstep.parity.cases.formats import FORMATS


def ordered(tensor: Tensor) -> Tensor:
    """Map bits to int64 so that neighbours differ by one; -0 and +0 both become 0.

    Args:
        tensor: fp16, bf16, fp32 or float64, any shape; on the CPU.
    """
    form = FORMATS[tensor.dtype]
    bits = tensor.contiguous().view(form.signed).to(torch.int64)
    lowest = -(1 << (form.width - 1))
    return torch.where(bits < 0, lowest - bits, bits)


def ulp_distance(got: Tensor, want: Tensor) -> Tensor:
    """Steps between neighbours from `want` to `got`, int64; inf is one step beyond the largest.

    NaN against NaN is 0, NaN against a number -1 (there is no distance). The sign of zero has no
    distance either: `same` compares it.

    >>> ulp_distance(torch.tensor([1.0]), torch.tensor([1.0000001])).tolist()
    [1]
    """
    got_nan, want_nan = torch.isnan(got), torch.isnan(want)
    distance = (ordered(got) - ordered(want)).abs()
    distance = torch.where(got_nan & want_nan, torch.zeros_like(distance), distance)
    return torch.where(got_nan ^ want_nan, torch.full_like(distance, -1), distance)


def same(got: Tensor, want: Tensor) -> Tensor:
    """Mask of equal bits, NaN payloads apart: +0 and -0 differ.

    Args:
        got: any dtype.
        want: the same dtype and shape.
    """
    if got.dtype not in FORMATS:
        return got == want
    signed = FORMATS[got.dtype].signed
    equal = got.contiguous().view(signed) == want.contiguous().view(signed)
    return equal | (torch.isnan(got) & torch.isnan(want))


def hex_bits(value: Tensor) -> str:
    """The bits of a 0-dim tensor, as hexadecimal digits of its full width.

    >>> hex_bits(torch.tensor(-0.0, dtype=torch.float16))
    '0x8000'
    """
    if value.dtype not in FORMATS:
        return hex(int(value.item()))
    form = FORMATS[value.dtype]
    word = int(value.contiguous().view(form.signed).item()) % (1 << form.width)
    return f"0x{word:0{form.width // 4}x}"


def decimal(value: Tensor) -> str:
    """A 0-dim tensor as the shortest decimal that names it among its neighbours."""
    if value.dtype not in FORMATS:
        return str(int(value.item()))
    digits = {8: 3, 16: 5, 32: 9, 64: 17}[FORMATS[value.dtype].width]
    number = float(value.item())
    exact = next(f"{number:.{n}g}" for n in range(1, 18) if n == 17 or _names(number, n, value))
    return exact if len(exact) <= digits + 8 else f"{number:.{digits}g}"


def _names(number: float, digits: int, value: Tensor) -> bool:
    back = torch.tensor(float(f"{number:.{digits}g}"), dtype=torch.float64).to(value.dtype)
    return bool(back == value) or number != number
