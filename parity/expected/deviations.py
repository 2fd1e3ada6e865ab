"""Deviations that a bounded kernel may have by name and with a reason.

An accepted one widens the bound of what derives from the scalar it is about, by what the deviation
makes of that scalar, and nothing else: every law is judged as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twinstep.parity.expected.bounded import Bounded
from twinstep.parity.expected.bounds import HALF_ULP
from twinstep.parity.expected.carried import known
from twinstep.reference.arithmetic import bias_correction_of, fp32, fp64, one_minus, power


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """One way to form a scalar that loses digits.

    Attributes:
        says: what is done.
        weight: how serious it is, in figures.
        forms: the function of the reference that forms the scalar.
        error: from the same arguments, how far off the scalar may be.
        operations: whose reference forms it so.
    """

    says: str
    weight: str
    forms: Callable[..., Tensor]
    error: Callable[..., Tensor]
    operations: tuple[str, ...]


def _lost(beta: Tensor) -> Tensor:
    return (fp64(fp32(beta)) - beta).abs()


def _lost_power(beta: Tensor, t: int) -> Tensor:
    """The power of the rounded beta, and four ULP below 1, which `powf` of CUDA may be off by."""
    exact = power(beta, t)
    return (power(fp32(beta), t) - exact).abs() + 4 * HALF_ULP * exact


ADAM = ("adam_step", "adamw_step", "apex_lamb_step", "mixed_step")
DEVIATIONS: Mapping[str, Deviation] = {
    "one_minus_beta": Deviation(
        says="1 - beta is formed in fp32, where it loses digits",
        weight="1 - 0.999 is off by 1.3e-5 of its value, and so is what it adds to a moment",
        forms=one_minus,
        error=_lost,
        operations=(*ADAM, "lamb_step"),
    ),
    "power_of_beta": Deviation(
        says="beta^t is formed in fp32, where 1 - beta^t loses digits",
        weight="1 - 0.999^t is off by up to 2e-5 of its value, and the step by half of that",
        forms=bias_correction_of,
        error=_lost_power,
        operations=ADAM,
    ),
}
CONTROLS = ("beta1", "beta2")


def known_deviations(operation: str) -> tuple[str, ...]:
    """Names of the deviations that a kernel of an operation may have."""
    return tuple(name for name, row in DEVIATIONS.items() if operation in row.operations)


def accepting(name: str, control: Tensor, accepts: Sequence[str]) -> Tensor:
    """A control, which makes scalars of it carry the error of accepted deviations."""
    if name not in CONTROLS or not accepts:
        return control
    loose = control.detach().as_subclass(_Loose)
    loose.accepts = tuple(accepts)
    return loose


class _Loose(Tensor):
    """A control whose scalars may be formed with a deviation."""

    accepts: tuple[str, ...]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """The result on plain tensors, with the error of a deviation that is about `func`."""
        accepts = next((x.accepts for x in args if isinstance(x, _Loose)), ())
        with torch._C.DisableTorchFunctionSubclass():
            plain = [x.as_subclass(Tensor) if isinstance(x, _Loose) else x for x in args]
            result = func(*plain, **(kwargs or {}))
            rows = (DEVIATIONS[name] for name in accepts)
            found = next((row for row in rows if row.forms is func), None)
            if found is None or not isinstance(result, Tensor):
                return result
            carried = known(result)
            error = found.error(*plain) + HALF_ULP * carried.exact.abs()
            return Bounded(replace(carried, error=error, computed=True))
