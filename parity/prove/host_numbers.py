"""Numbers that the host reads from tensors with names: Python floats with a name of their own.

`tensor.item()` gives a float that carries its expression in float64. Arithmetic of such floats is
arithmetic of float64; a comparison is a branch. A launch on replay takes them as arguments. What
would lose the name (`float(tensor)`, `tolist`, `numpy`) is refused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from twinstep.parity.prove.exact_sums import root
from twinstep.parity.prove.torch_forms import SCALARS
from twinstep.parity.prove.torch_names import KIND, TorchNames
from twinstep.parity.runner.calls.places import place_in
from twinstep.replay.machine.named import HostNumber
from twinstep.replay.names.naming import set_names
from twinstep.replay.names.session import NotNamed
from twinstep.replay.names.values import comparison

MATH: dict[str, Callable[..., Any]] = {
    "isfinite": math.isfinite,
    "sqrt": math.sqrt,
    "pow": math.pow,
}
LOST = ("tolist", "numpy", "__array__", "__float__", "__int__", "__index__", "__dlpack__")
BY_ZERO = "division by zero"
"""Place of a condition whose other side raises: a call that does is no part of a proof."""
EXACT = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}


class NamedFloat(HostNumber):
    """A Python float with a name.

    Args:
        value: of this run.
        number: of its expression, in float64.
        mode: that it was read under.
    """

    def __init__(self, value: float, number: int, mode: TorchNames) -> None:
        self.value, self.number, self.mode = value, number, mode

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Float: code that asks goes the way that it goes with a plain one."""
        return float

    def _number(self, other: object) -> int:
        if isinstance(other, NamedFloat):
            return other.number
        bits = int(np.array(float(other), np.float64).view(np.uint64))  # type: ignore[arg-type]
        return self.mode.session.table.const(bits, 4)

    def _with(self, word: str, left: object, right: object) -> object:
        if isinstance(left, Tensor) or isinstance(right, Tensor):
            return NotImplemented
        if not all(isinstance(x, NamedFloat | int | float) for x in (left, right)):
            return NotImplemented
        if word == "div" and isinstance(right, NamedFloat) and right.value:
            right._decided("eq", 0.0, False, BY_ZERO)
        numbers = [np.array([[self._number(x)]]) for x in (left, right)]
        found = self.mode.session.table.each(f"{word}.rn.f64", numbers, 4, _here())
        return NamedFloat(EXACT[word](_plain(left), _plain(right)), int(found.flat[0]), self.mode)

    def _decided(self, word: str, other: object, outcome: bool, place: str = "") -> bool:
        numbers = [np.array([[n]]) for n in (self.number, self._number(other))]
        found = comparison(word, "f64", numbers, _here())
        self.mode.session.decide(int(found.flat[0]), outcome, place or f"host branch{_here()}")
        return outcome

    def __add__(self, other: object) -> Any:
        return self._with("add", self, other)

    def __radd__(self, other: object) -> Any:
        return self._with("add", other, self)

    def __sub__(self, other: object) -> Any:
        return self._with("sub", self, other)

    def __rsub__(self, other: object) -> Any:
        return self._with("sub", other, self)

    def __mul__(self, other: object) -> Any:
        return self._with("mul", self, other)

    def __rmul__(self, other: object) -> Any:
        return self._with("mul", other, self)

    def __truediv__(self, other: object) -> Any:
        return self._with("div", self, other)

    def __rtruediv__(self, other: object) -> Any:
        return self._with("div", other, self)

    def __pow__(self, other: object) -> Any:
        if isinstance(other, NamedFloat | Tensor):
            return NotImplemented
        # Rounded as the host's library likes, a function of its operands.
        numbers = (self.number, self._number(other))
        found = self.mode.session.table.row("pow.host.f64", numbers, 4, _here())
        return NamedFloat(self.value ** _plain(other), found, self.mode)

    def __neg__(self) -> NamedFloat:
        return self._alone("neg.f64", -self.value)

    def __abs__(self) -> NamedFloat:
        return self._alone("abs.f64", abs(self.value))

    def _alone(self, op: str, value: float) -> NamedFloat:
        number = self.mode.session.table.row(op, (self.number,), 4, _here())
        return NamedFloat(value, number, self.mode)

    def __eq__(self, other: object) -> bool:
        return self._decided("eq", other, self.value == _plain(other))

    def __ne__(self, other: object) -> bool:
        return self._decided("neu", other, self.value != _plain(other))

    def __lt__(self, other: object) -> bool:
        return self._decided("lt", other, self.value < _plain(other))

    def __le__(self, other: object) -> bool:
        return self._decided("le", other, self.value <= _plain(other))

    def __gt__(self, other: object) -> bool:
        return self._decided("gt", other, self.value > _plain(other))

    def __ge__(self, other: object) -> bool:
        return self._decided("ge", other, self.value >= _plain(other))

    def __bool__(self) -> bool:
        return self != 0.0

    def __format__(self, _: str) -> str:
        raise NotNamed(f"a number that has a name becomes text{_here()}", "text", _here())

    def __str__(self) -> str:
        return format(self)

    __repr__ = __str__

    def __float__(self) -> float:
        raise NotNamed(f"a number that has a name becomes a plain float{_here()}", "float", _here())

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, *_: object) -> object:
        """Torch takes it as an argument, and `HostReads` is asked first."""
        return NotImplemented

    def isfinite(self) -> bool:
        """Outcome of `math.isfinite`, a branch."""
        return abs(self) < math.inf

    def sqrt(self) -> NamedFloat:
        """Result of `math.sqrt`."""
        return self._alone("sqrt.rn.f64", MATH["sqrt"](self.value))

    pow = __pow__


def _plain(x: Any) -> float:
    return x.value if isinstance(x, NamedFloat) else float(x)


def _taking_names(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *rest: (
        getattr(x, name)(*rest) if isinstance(x, NamedFloat) else function(x, *rest)
    )


class HostReads(TorchFunctionMode):
    """Gives `item` a name, and takes such numbers back into tensors.

    Args:
        mode: active inside this one.
    """

    def __init__(self, mode: TorchNames) -> None:
        super().__init__()
        self.mode = mode

    def __enter__(self) -> Self:
        """Let functions of `math` take numbers with names."""
        for name, function in MATH.items():
            setattr(math, name, _taking_names(name, function))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        """Put the functions of `math` back."""
        for name, function in MATH.items():
            setattr(math, name, function)
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch."""
        name, words = getattr(func, "__name__", ""), dict(kwargs or {})
        if name in ("item", *LOST, "__bool__") and isinstance(args[0], Tensor):
            return self._read(name, func, args, words)
        if name == "tensor" and args and isinstance(args[0], NamedFloat):
            return self.tensor(args[0], words.get("dtype") or torch.get_default_dtype())
        if name == "root_of_squares":
            return root(self.mode, func, args[0])
        tensors = [x for x in args if isinstance(x, Tensor)]
        found = self._given(name.rstrip("_"), args, words)
        if found is not None:
            plain, keywords, self.mode.given = found
            try:
                result = func(*plain, **keywords)
                if self.mode.given is not None:
                    raise NotNamed(f"a number that has a name is given to {name}", name, _here())
            finally:
                self.mode.given = None
            return result

        def _tensor(x: Any) -> Any:
            if not isinstance(x, NamedFloat):
                return x
            if not tensors or tensors[0].dtype not in (torch.float32, torch.float64):
                raise NotNamed(f"a number that has a name is given to {name}", name, _here())
            # A Python number is rounded to the type of the tensor it meets.
            return self.tensor(x, tensors[0].dtype)

        return func(*tree_map(_tensor, tuple(args)), **tree_map(_tensor, words))

    def _given(
        self, word: str, args: Sequence[Any], words: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any], int] | None:
        """Arguments with a plain number for one that has a name, and the name; None without one."""
        keyword = SCALARS.get(word, "weight")
        position = 2 if word == "lerp" and len(args) > 2 else None
        number = args[position] if position is not None else words.get(keyword)
        if isinstance(number, Tensor) and word in SCALARS:
            number = self._read("item", Tensor.item, (number,), {})
        if not isinstance(number, NamedFloat) or word not in (*SCALARS, "lerp"):
            return None
        if position is None:
            return args, {**words, keyword: number.value}, number.number
        return (*args[:2], number.value, *args[3:]), words, number.number

    def _read(
        self, name: str, func: Callable[..., Any], args: Sequence[Any], words: Mapping[str, Any]
    ) -> Any:
        """A host read.

        Raises:
            NotNamed: the name would be lost.
        """
        tensor: Tensor = args[0]
        numbers = self.mode.names(tensor)
        if not (numbers >= 0).any():
            return func(*args, **words)
        if name == "__bool__" and tensor.dtype != torch.bool:
            return bool(func(tensor != 0))
        if name == "__bool__" or tensor.dtype == torch.bool:
            with torch._C._DisableTorchDispatch():
                outcome = bool(tensor.reshape(()).numpy().item())
            self.mode.session.decide(int(numbers.reshape(())), outcome, f"host branch{_here()}")
            return outcome
        if name == "item" and tensor.dtype in KIND:
            wide = self.mode.converted(numbers.reshape(1, 1), tensor.dtype, torch.float64)
            with torch._C._DisableTorchDispatch():
                value = float(tensor.detach().double().reshape(()).numpy())
            return NamedFloat(value, int(wide.flat[0]), self.mode)
        raise NotNamed(f"{name} of a tensor with names{_here()}", name, _here())

    def tensor(self, x: NamedFloat, dtype: torch.dtype) -> Tensor:
        """A 0-dim tensor of a number with a name."""
        made = torch.tensor(x.value, dtype=dtype)
        number = self.mode.converted(np.array([[x.number]]), torch.float64, dtype)
        set_names(self.mode.session, made, number.reshape(()))
        return made


def _here() -> str:
    import sys

    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back  # type: ignore[assignment]
    return place_in(frame)
