"""Does a function have the signature of an operation, and an operation dtypes for its lists?"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from twinstep.parity.operations.operation import Operation, Shape
from twinstep.parity.records.errors import UsageError

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def signature_text(operation: Operation) -> str:
    """The operation's arguments as they stand in a `def`."""
    positional = [argument.name for argument in operation.lists]
    keywords = list(operation.keywords)
    return f"({', '.join([*positional, *(['*'] if keywords else []), *keywords])})"


def check_signature(function: Callable[..., object], operation: Operation, where: str) -> None:
    """Require positional lists in order, then controls and options by keyword in any order.

    Further arguments are allowed when they have defaults. A function that takes `*args` or
    `**kwargs` may leave out names on that side.

    Raises:
        UsageError: an argument is missing, out of order, or unknown.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise UsageError(
            f"{function!r} has no signature, but should take {signature_text(operation)} [{where}]"
        ) from None
    kinds = {parameter.kind for parameter in parameters}
    wrong = _positional_fault(list(parameters), operation, kinds) or _keyword_fault(
        list(parameters), operation, kinds
    )
    if wrong:
        name = getattr(function, "__name__", repr(function))
        raise UsageError(
            f"{name} {wrong}, but {operation.name} should take {signature_text(operation)} "
            f"[{where}]"
        )


Kinds = set[inspect._ParameterKind]


def _positional_fault(
    parameters: list[inspect.Parameter], operation: Operation, kinds: Kinds
) -> str:
    wanted = [argument.name for argument in operation.lists]
    given = [p.name for p in parameters if p.kind in POSITIONAL]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return ""
    for place, name in enumerate(wanted):
        if place >= len(given):
            return f"lacks the positional argument {name}"
        if given[place] != name:
            return f"has {given[place]} as positional argument {place + 1}, not {name}"
    return ""


def _keyword_fault(parameters: list[inspect.Parameter], operation: Operation, kinds: Kinds) -> str:
    lists = {argument.name for argument in operation.lists}
    named = {p.name: p for p in parameters if p.kind not in (inspect.Parameter.VAR_KEYWORD,)}
    missing = [name for name in operation.keywords if name not in named]
    if missing and inspect.Parameter.VAR_KEYWORD not in kinds:
        return f"lacks the keyword argument {missing[0]}"
    for parameter in parameters:
        required = parameter.default is inspect.Parameter.empty
        variadic = parameter.kind in (
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        )
        known = parameter.name in lists or parameter.name in operation.keywords
        if required and not variadic and not known:
            return f"has the unknown argument {parameter.name} without a default"
    return ""


def check_combinations(operation: Operation, where: str) -> None:
    """Require dtypes for every list of every combination, and for nothing else.

    Raises:
        UsageError: a combination names no list, leaves one out, or holds no dtypes.
    """
    lists = {argument.name for argument in operation.lists}
    needed = {argument.name for argument in operation.lists if not argument.optional}
    for name, combination in operation.combinations.items():
        for argument, dtypes in combination.items():
            if argument not in lists:
                raise UsageError(
                    f'combination "{name}" has "{argument}", but should name lists of '
                    f"{operation.name}: {', '.join(sorted(lists))} [{where}]"
                )
            if not dtypes or not all(isinstance(dtype, torch.dtype) for dtype in dtypes):
                raise UsageError(
                    f'combination "{name}" has {argument}={dtypes!r}, but should have a tuple of '
                    f"torch dtypes [{where}]"
                )
        if needed - combination.keys():
            raise UsageError(
                f'combination "{name}" lacks {sorted(needed - combination.keys())[0]}, but should '
                f"have dtypes for every list that is not optional [{where}]"
            )
    if not operation.combinations:
        raise UsageError(f"combinations is empty, but should name at least one [{where}]")


# A vector and matrices, empty ones too: what a shape may be asked for.
PROBES: tuple[Shape, ...] = ((0,), (3,), (4, 7), (5, 2))


def check_shapes(operation: Operation, where: str) -> None:
    """Require shapes that follow from a leading list, and laws that hold with them.

    Raises:
        UsageError: the first list has a shape of its own or is single, a shape is none, or a law
            cuts tensors that belong together.
    """
    for argument in operation.shaped:
        lead = operation.lists[0]
        if lead.shape is not None or lead.single:
            raise UsageError(
                f"{argument.name} has a shape, but the first list, {lead.name}, should be the one "
                f"that it follows from [{where}]"
            )
        try:
            found = operation.companions(argument.name, PROBES)
        except Exception as error:
            raise UsageError(
                f"shape of {argument.name} raises {type(error).__name__}: {error} [{where}]"
            ) from error
        if any(not isinstance(n, int) or n < 0 for _, shape in found for n in shape):
            raise UsageError(
                f"shape of {argument.name} gives {[shape for _, shape in found]}, but should give "
                f"tuples of whole numbers [{where}]"
            )
        unequal = ("permutation",) if len(found) < len(PROBES) else ()
        for law in ("splitting", "large_index", *unequal):
            if law in operation.laws:
                raise UsageError(
                    f"{law} cannot be judged where {argument.name} has shapes of its own [{where}]"
                )
