"""Every way in which our kernels are launched: found by launching them, with nothing compiled.

Each launcher is called on small tensors for every dtype combination and layout that it claims and
for its options, and our optimizer classes take steps; Triton's `jit_cache_hook` receives what would
be compiled, and declines.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
from triton.runtime.jit import JITFunction

from twinstep.parity.cases.case import Recipe
from twinstep.parity.cases.generate import generate
from twinstep.parity.operations.operation import Operation, OptionValue
from twinstep.parity.proof.gates.compile.optimizers import steps
from twinstep.parity.registry.kernels import Kernel
from twinstep.replay.triton.driver import ReplayDriver

Place = tuple[int, ...]
FULL_PRODUCT = 8  # combinations of options; beyond, every rule with the others at both ends


@dataclass(frozen=True)
class Variant:
    """One specialisation of one kernel, as Triton would compile it.

    Attributes:
        module: that holds the kernel.
        kernel: its name.
        signature: argument -> type.
        constants: place of an argument -> its compile-time value.
        attributes: place of an argument -> what the compiler may assume of it.
        warps: of a program.
        fusion: whether products and sums may be contracted.
        operations: names of those that launch it, and of optimizer classes.
    """

    module: str
    kernel: str
    signature: dict[str, str]
    constants: dict[Place, object]
    attributes: dict[Place, list[list[object]]]
    warps: int
    fusion: bool
    operations: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Kernel, types of the tensors that lie on 16 bytes, and compile-time values."""
        arguments = list(self.signature)
        aligned = {arguments[place[0]] for place, facts in self.attributes.items() if facts}
        parts = [
            f"{argument}={kind[1:]}"
            for argument, kind in self.signature.items()
            if argument in aligned and kind.startswith("*")
        ]
        for place, value in self.constants.items():
            argument = arguments[place[0]]
            if isinstance(value, bool):
                parts += [argument] * value
            else:
                parts.append(f"{argument}={getattr(value, 'name', value)}")
        return " ".join([self.kernel, *parts, *["fusion"] * self.fusion])

    @property
    def source(self) -> str:
        """Everything that decides what the compiler makes of it, the kernel's source included."""
        parts = (self.signature, self.constants, self.attributes, self.warps, self.fusion)
        return f"{self.function().cache_key} {parts}"

    def function(self) -> JITFunction[object]:
        """The kernel itself."""
        found = getattr(importlib.import_module(self.module), self.kernel)
        assert isinstance(found, JITFunction)
        return found


class _Recorder(ReplayDriver):
    """Takes CPU tensors, on a device for which nothing was ever compiled."""

    def get_current_device(self) -> int:
        """A device index of its own."""
        return 1001


@contextmanager
def recorded() -> Iterator[dict[str, Variant]]:
    """Collect, by name, what launches inside the block would compile; nothing runs."""
    found: dict[str, Variant] = {}

    def note(*, fn: object, compile: Mapping[str, object], **_: object) -> bool:
        one = _variant(fn, compile)
        known = found.setdefault(one.name, one)
        assert known == one, f"two variants are called {one.name}"
        return True

    previous = triton.runtime.driver._active
    hook = triton.knobs.runtime.jit_cache_hook
    triton.runtime.driver.set_active(_Recorder())
    triton.knobs.runtime.jit_cache_hook = note
    try:
        yield found
    finally:
        triton.knobs.runtime.jit_cache_hook = hook
        triton.runtime.driver.set_active(previous)


def _variant(fn: object, compile: Mapping[str, object]) -> Variant:
    function = fn.jit_function  # type: ignore[attr-defined]  # Triton's JitFunctionInfo
    attributes = compile["configs"][0]  # type: ignore[index]
    return Variant(
        module=function.fn.__module__,
        kernel=function.fn.__name__,
        signature=dict(compile["signature"]),  # type: ignore[call-overload]
        constants=dict(compile["constants"]),  # type: ignore[call-overload]
        attributes=dict(attributes),
        warps=int(compile["num_warps"]),  # type: ignore[call-overload]
        fusion=bool(compile["enable_fp_fusion"]),
    )


def variants_of(kernels: Sequence[Kernel], optimizers: bool = False) -> list[Variant]:
    """Every variant that these kernels launch, sorted by name.

    `optimizers`: and those that our optimizer classes launch besides.
    """
    merged: dict[str, Variant] = {}
    for user, launch in itertools.chain(launches(kernels), steps() if optimizers else ()):
        with recorded() as found:
            launch()
        for name, one in found.items():
            before = merged.get(name, one)
            merged[name] = replace(one, operations=before.operations | {user})
    return [merged[name] for name in sorted(merged)]


def launches(kernels: Sequence[Kernel]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Name of an operation, and what launches one of its kernels in every way that it claims."""
    for kernel in kernels:
        name = kernel.operation.name
        for dtype, layout in itertools.product(kernel.dtypes, kernel.layouts or ("",)):
            yield name, partial(_launch, kernel, dtype, layout)
        if kernel.name == "triton.mixed_step":
            yield name, partial(_launch_compat, kernel)


def _launch(kernel: Kernel, dtype: str, layout: str) -> None:
    operation = kernel.operation
    sizes = {"flat": (32,), "list": (32, 33, 34)}.get(layout, ())
    absent = (False, True) if any(a.optional for a in operation.lists) else (False,)
    for options, left_out in itertools.product(option_sets(operation), absent):
        recipe = Recipe(layout=layout or "flat", sizes=sizes, options=options, absent=left_out)
        case = generate(operation, dtype, recipe)
        kernel(*case.lists.values(), **case.controls, **case.options)


def _launch_compat(kernel: Kernel) -> None:
    """The programs of a whole step that only `contract.compat.Compat` switches on."""
    from twinstep.fast.kernels.finalise import CONTROLS, Finish, finalise
    from twinstep.fast.kernels.mixed_step import new_coefficients
    from twinstep.fast.kernels.reduce import new_limbs
    from twinstep.fast.runtime.control import ControlBlock

    device = torch.device("cpu")
    block = ControlBlock(device, {})
    controls, steps = [block[name] for name in CONTROLS], [torch.tensor(0)]
    for rule in _choices(kernel.operation, "rule"):
        finish = Finish(
            rule=str(rule),
            growth_counts_this_step=True,
            unscale_with_updated_scale=True,
        )
        finalise(new_limbs(device), steps, new_coefficients(device, 1), controls, finish)


def option_sets(operation: Operation) -> list[dict[str, OptionValue]]:
    """The values of the options to launch with.

    All combinations where there are few. Otherwise every value of the option with the most, with
    all others at their first and at their last.
    """
    names = [option.name for option in operation.options]
    choices = [option.choices for option in operation.options]
    product = list(itertools.product(*choices))
    if len(product) <= FULL_PRODUCT:
        return [dict(zip(names, values, strict=True)) for values in product]
    main = max(operation.options, key=lambda option: len(option.choices))
    return [
        {o.name: value if o is main else o.choices[end] for o in operation.options}
        for value in main.choices
        for end in (0, -1)
    ]


def _choices(operation: Operation, name: str) -> tuple[OptionValue, ...]:
    return next(option.choices for option in operation.options if option.name == name)
