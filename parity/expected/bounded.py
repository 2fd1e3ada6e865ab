"""A tensor that carries its bound through the reference, which takes it for an ordinary one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from twinstep.parity.expected.bounds import followed, settled
from twinstep.parity.expected.bounds_composed import COMPOSED
from twinstep.parity.expected.bounds_sum import bounded_l2_norm
from twinstep.parity.expected.bounds_table import (
    COMPARISONS,
    CREATORS,
    FAMILY_OF,
    FORMULAS,
    MOVES,
    Family,
)
from twinstep.parity.expected.carried import (
    Arguments,
    Carried,
    Function,
    Keywords,
    Nested,
    known,
    leaves,
    mapped,
)
from twinstep.reference.norm import root_of_squares

# Of these a reference's own tensors have other strides than the carried ones may have.
VIEWS = ("_unsafe_view", "view")


class NotBounded(Exception):
    """An operator that no bound is known for, by its name."""


class Bounded(Tensor):
    """A tensor that the reference takes for an ordinary one.

    Attributes:
        carried: facts of its elements.
        pending: `error` lacks the rounding to the tensor's dtype.
        viewed: it is a view, or has one, so that nothing can be written in place.
    """

    carried: Carried
    pending: bool
    viewed: bool

    @staticmethod
    def __new__(cls, carried: Carried, *, pending: bool = False) -> Bounded:
        """Wrap; `pending` means that `error` lacks the rounding to the dtype of `value`."""
        value = carried.value
        bounded = Tensor._make_wrapper_subclass(
            cls, value.shape, dtype=value.dtype, device=value.device
        )
        bounded.carried = carried
        bounded.pending = pending
        bounded.viewed = False
        return bounded

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Leave everything to the dispatcher but the exact norm, which calls no tensor operation.

        The inherited handler would wrap every plain result in this class, with nothing carried.
        """
        if func is root_of_squares:
            return _root_of_squares(cast("Sequence[Tensor]", args[0]))
        return torch._C._disabled_torch_function_impl(func, types, tuple(args), dict(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operator on the values, and its rule on what they carry."""
        return _dispatched(func, args, kwargs or {})


def charged(x: Bounded) -> Carried:
    """Facts of x, with the rounding to its storage if that is still to be charged."""
    c = x.carried
    if not x.pending:
        return c
    unit = torch.finfo(x.dtype)
    half = (c.exact.abs() + c.error) * (unit.eps / 2) + unit.smallest_normal * unit.eps
    return replace(c, error=c.error + half)


def _root_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The exact norm of the reference with its bound."""
    carried = [charged(x) if isinstance(x, Bounded) else known(x) for x in tensors]
    value = root_of_squares([c.value for c in carried]).to(torch.float32)
    exact, error, zone = bounded_l2_norm(
        value, [c.exact for c in carried], [c.error for c in carried]
    )
    zone = zone | torch.tensor(any(bool(c.zone.any()) for c in carried))
    norm = replace(known(value), exact=exact, error=error, zone=zone, computed=True)
    return Bounded(followed(norm))


def _dispatched(func: OpOverload, args: Arguments, kwargs: Keywords) -> object:
    """A result of the operator, whose tensors carry their bounds.

    Raises:
        NotBounded: there is no rule for it.
    """
    name = func._schema.name.rpartition("::")[2]
    if name.startswith("_foreach_"):
        return _for_each(name.removeprefix("_foreach_"), args, kwargs)
    if func._schema.is_mutable:
        return _in_place(func, name, args, kwargs)
    function: Function = _as_reshape if name in VIEWS and func._overloadname != "dtype" else func
    plain = function(*_plain(args), **_plain(kwargs))
    tensors = [x for x in leaves(plain) if isinstance(x, Tensor)]
    operands = [x for x in leaves((args, kwargs)) if isinstance(x, Bounded)]
    if name == "_to_copy":
        return _converted(operands[0], tensors[0])
    if not any(x.is_floating_point() for x in tensors) and not any(map(_open, operands)):
        return plain
    if name in CREATORS:
        return Bounded(known(tensors[0])) if tensors[0].is_floating_point() else plain
    if name in ("copy", "fill"):
        source = torch.as_tensor(cast(Tensor, args[1])).to(tensors[0].dtype)
        return source.expand(tensors[0].shape).clone()
    if name in COMPOSED:
        found = COMPOSED[name](*mapped(_widened, args), **mapped(_widened, kwargs))
        carried = found.carried if isinstance(found, Bounded) else known(found)
        return _result(FORMULAS, carried, tensors[0])
    name = "logical_and" if name == "mul" and tensors[0].dtype == torch.bool else name
    family = FAMILY_OF.get(name)
    conditional = family is COMPARISONS and tensors and tensors[0].dtype != torch.bool
    if family is None or not tensors or conditional or func._overloadname == "dtype":
        # Inside a formula torch takes operators apart here that it takes apart before otherwise.
        made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return cast(object, made)
        says = "takes a rounded number out of its tensor" if not tensors else "has no error bound"
        raise NotBounded(f"{func} {says}")
    return _by_rule(name, family, function, (args, kwargs), plain)


def _by_rule(
    name: str,
    family: Family,
    function: Function,
    arguments: tuple[Arguments, Keywords],
    plain: object,
) -> object:
    """What the rule of a family makes of the arguments, beside the plain results."""
    facts: dict[int, Carried] = {}

    def fact(x: object) -> object:
        if isinstance(x, Bounded):
            # A number that is compared with itself has to be known as one.
            return facts.setdefault(id(x), x.carried if family.keeps else charged(x))
        return known(x) if isinstance(x, Tensor) and x.is_floating_point() else x

    def index(x: object) -> object:
        if isinstance(x, Bounded) and not x.is_floating_point():
            if _open(x):
                raise NotBounded(f"aten.{name} takes a place that rounding may change")
            return x.carried.value
        return fact(x)

    args, kwargs = arguments
    first = mapped(fact, args[:1])
    rest = mapped(index if family is MOVES else fact, args[1:])
    named = mapped(fact, kwargs)
    found = family.rules[name](function, (*first, *rest), named)
    operands = [x for x in leaves(arguments) if isinstance(x, Bounded)]
    pending = family.keeps and any(x.pending for x in operands)
    rows = [found] if isinstance(found, Carried) else list(found)
    results = []
    for carried, tensor in zip(rows, cast("Iterable[Tensor]", leaves(plain)), strict=True):
        results.append(_result(family, carried, tensor, pending=pending))
        for x in operands if family is MOVES else ():
            if _shares(x.carried.value, tensor):
                x.viewed = cast(Bounded, results[-1]).viewed = True
    return results[0] if isinstance(plain, Tensor) else tuple(results)


def _result(family: Family, c: Carried, plain: Tensor, *, pending: bool = False) -> Tensor:
    if family.settles:
        c = settled(c, plain)
    c = replace(c, value=plain)
    if plain.dtype == torch.bool:
        return Bounded(c) if bool(c.error.any()) else plain
    if not plain.is_floating_point():
        # The numbers near a whole one are whole; past the type's ends they are what they are.
        wrapped = c.exact != plain.to(torch.float64)
        return Bounded(replace(c, error=c.error.floor(), zone=c.zone | wrapped))
    short = plain.itemsize < 4
    return Bounded(followed(c), pending=short and (family.rounds or pending))


def _in_place(func: OpOverload, name: str, args: Arguments, kwargs: Keywords) -> Tensor:
    """Give the first argument what the operator without the underscore makes of it."""
    target = args[0]
    if not isinstance(target, Bounded) or not name.endswith("_") or target.viewed:
        where = "a view" if isinstance(target, Bounded) else "a tensor that carries no bound"
        raise NotBounded(f"{func} writes into {where}")
    packet = getattr(torch.ops.aten, name.removesuffix("_"))
    made = getattr(packet, func._overloadname)(*args, **kwargs).to(target.dtype)
    made = made if isinstance(made, Bounded) else Bounded(known(made))
    target.carried, target.pending = made.carried, made.pending
    return target


def _for_each(name: str, args: Arguments, kwargs: Keywords) -> object:
    """The operator on each tensor of the lists."""
    packet = getattr(torch.ops.aten, name)
    results = []
    for at in range(len(cast("Sequence[Tensor]", args[0]))):
        row = [x[at] if isinstance(x, list | tuple) else x for x in args]
        named = {k: x[at] if isinstance(x, list | tuple) else x for k, x in kwargs.items()}
        if name.startswith("addc") and len(row) > 3:
            named["value"] = row.pop()
        results.append(packet(*row, **named))
    return None if name.endswith("_") else results


def _converted(x: Bounded, plain: Tensor) -> Tensor:
    """A copy in another dtype."""
    if plain.dtype == torch.bool:
        return x != 0
    if not x.is_floating_point():
        return Bounded(replace(x.carried, value=plain))
    if not plain.is_floating_point():
        return _to_integers(x, plain)
    narrower = torch.finfo(plain.dtype).eps > torch.finfo(x.dtype).eps
    return Bounded(replace(charged(x), value=plain), pending=narrower and plain.itemsize < 4)


def _to_integers(x: Bounded, plain: Tensor) -> Tensor:
    """A conversion to integers cuts fractions off; open where another honest number has another."""
    c = charged(x)
    low, high = (c.exact - c.error).trunc(), (c.exact + c.error).trunc()
    exact = c.exact.trunc()
    error = torch.maximum(high - exact, exact - low)
    return Bounded(replace(c, value=plain, exact=exact, error=error))


def _plain(arguments: Nested) -> Nested:
    def value(x: object) -> object:
        return x.carried.value if isinstance(x, Bounded) else x

    return mapped(value, arguments)


def _widened(x: object) -> object:
    """A number of 16 bits as fp32, in which torch evaluates a formula."""
    short = isinstance(x, Tensor) and x.is_floating_point() and x.itemsize < 4
    return cast(Tensor, x).to(torch.float32) if short else x


def _open(x: Bounded) -> bool:
    return x.pending or bool((x.carried.error != 0).any() | x.carried.zone.any())


def _as_reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A view where there is one: what is carried may have other strides than the tensor."""
    return x.reshape(shape)


def _shares(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
