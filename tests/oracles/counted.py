"""Running error bounds: a formula evaluated in float64 while its fp32 roundings are counted.

Every operation of fp32 arithmetic adds at most half an ULP of its result. `Counted` carries the
float64 value and a bound on how far an fp32 evaluation in the same order can be from it; bounds
propagate through each operation as in Higham (2002), section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

UNIT = 2.0**-24
SUBNORMAL = 2.0**-150
# What float64 itself may be off by, a few operations each.
SLACK = 1.0 + 2.0**-40


@dataclass(frozen=True)
class Counted:
    """A value in float64 and a bound on the error of its fp32 evaluation, elementwise."""

    value: Tensor
    error: Tensor

    @classmethod
    def exact(cls, x: Tensor) -> Counted:
        """A stored fp32, fp16 or bf16 tensor: no error yet."""
        value = x.to(torch.float64)
        return cls(value, torch.zeros_like(value))

    @classmethod
    def scalar(cls, x: float) -> Counted:
        """A Python number that is rounded once to fp32."""
        return cls.exact(torch.tensor(x, dtype=torch.float64))._rounded()

    def _rounded(self) -> Counted:
        half_ulp = UNIT * (self.value.abs() + self.error) + SUBNORMAL
        return Counted(self.value, (self.error + half_ulp) * SLACK)

    def __add__(self, other: Counted) -> Counted:
        return Counted(self.value + other.value, self.error + other.error)._rounded()

    def __sub__(self, other: Counted) -> Counted:
        return Counted(self.value - other.value, self.error + other.error)._rounded()

    def __mul__(self, other: Counted) -> Counted:
        cross = self.value.abs() * other.error + other.value.abs() * self.error
        error = cross + self.error * other.error
        return Counted(self.value * other.value, error)._rounded()

    def __truediv__(self, other: Counted) -> Counted:
        smallest = other.value.abs() - other.error
        value = self.value / other.value
        error = (self.error + value.abs() * other.error) / smallest
        error = torch.where(smallest > 0, error, torch.inf)
        return Counted(value, error)._rounded()

    def sqrt(self) -> Counted:
        """Correctly rounded square root; the lower end of the interval gives the worst slope."""
        value = torch.sqrt(self.value)
        low = torch.sqrt(torch.clamp(self.value - self.error, min=0.0))
        return Counted(value, self.error / (value + low).clamp(min=2.0**-200))._rounded()
