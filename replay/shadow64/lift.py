"""The precision lift: a kernel's own formula, evaluated in float64 while it runs.

    with lifting([p, g, m, v]) as lift:
        kernel[grid](p, g, m, v, n, BLOCK=256)
    lift.read(p)      # what p would be without any rounding of what was computed from the data

Every value that derives from the given tensors is carried in float64 beside the kernel's own; a
conversion to fewer bits keeps the wide value, a store puts it beside the memory, a load finds it
again. What derives from no tensor of data (scalars, counters) keeps the kernel's arithmetic, and
the threads' paths follow the narrow values. Bit tricks cannot be lifted and are named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from twinstep.replay.launch.options import TRANSLATION
from twinstep.replay.machine.program import Program
from twinstep.replay.shadow64.emit import LiftedEmitter
from twinstep.replay.shadow64.memory import ShadowMemory
from twinstep.replay.shadow64.rules import RULES
from twinstep.replay.shadow64.runtime import GLOBAL, site_text
from twinstep.replay.shadow64.values import REST, TAINT
from twinstep.replay.translate.program import emitted
from twinstep.replay.translate.registers import RegisterTypes


@cache
def lifted(program: Program) -> Program:
    """The lifted translation of a program, made once.

    Raises:
        NotLiftable: the kernel has an instruction that moves data in a way not followed here.
    """
    kernel, layout = program.kernel, program.layout
    return emitted(kernel, layout, LiftedEmitter(kernel, RegisterTypes(kernel), layout, RULES))


@dataclass(frozen=True)
class Wide:
    """The lift's knowledge of one tensor.

    Attributes:
        value: float64, of the tensor's shape.
        stored: where a launch has put what is there now, bool.
        spoiled: the instruction after which no real number goes with an element, or empty.
    """

    value: Tensor
    stored: Tensor
    spoiled: str


class Lift:
    """The shadows of one call.

    Args:
        data: floating-point tensors, contiguous, on the CPU.
        others: the other tensors of the call: scalars and counters.
    """

    def __init__(self, data: Iterable[Tensor], others: Iterable[Tensor] = ()) -> None:
        self.memory = ShadowMemory()
        self._others = list(others)
        for tensor in self._others:
            places, bits = _granules(tensor)
            none = np.zeros(len(places))
            self.memory.store(places, none, none, bits, launch=False)
        self._kept = list(data)
        for tensor in self._kept:
            places, bits = _granules(tensor)
            g = tensor.element_size() // 2
            wide = np.repeat(tensor.detach().double().reshape(-1).numpy(), g)
            kind = np.full(len(places), REST, np.uint8)
            kind[::g] = g
            self.memory.store(places, wide, kind, bits, launch=False)

    @property
    def foreign(self) -> bool:
        """True if a launch read numbers that the host had put into memory of its own."""
        return self.memory.foreign

    def read(self, tensor: Tensor) -> Wide:
        """The lift's knowledge of a tensor now.

        Args:
            tensor: floating-point, contiguous, on the CPU; its memory is that of the call.
        """
        places, bits = _granules(tensor)
        g = tensor.element_size() // 2
        foreign = self.memory.foreign
        wide, kind, stored = self.memory.load(places, bits)
        self.memory.foreign = foreign
        first, value = kind[::g], tensor.detach().double().reshape(-1).numpy().copy()
        value = np.where(first == g, wide[::g], value)
        odd = (first != g) & (kind.reshape(-1, g) != 0).any(-1)
        spoiled = ""
        if odd.any():
            tainted = np.where(kind == TAINT, wide, -1.0)
            spoiled = site_text(int(tainted.max())) if (tainted >= 0).any() else "a partial store"
        shape = tensor.shape
        return Wide(
            torch.from_numpy(value).reshape(shape),
            torch.from_numpy(stored.reshape(-1, g).all(-1)).reshape(shape),
            spoiled,
        )


def _granules(tensor: Tensor) -> tuple[np.ndarray, np.ndarray]:
    g = tensor.element_size() // 2
    count = tensor.numel() * g
    places = tensor.data_ptr() // 2 + np.arange(count, dtype=np.int64)
    flat = tensor.detach().contiguous().reshape(-1)
    bits = flat.view(torch.int16).numpy().view(np.uint16) if count else np.zeros(0, np.uint16)
    return places, bits


@contextmanager
def lifting(data: Iterable[Tensor], others: Iterable[Tensor] = ()) -> Iterator[Lift]:
    """Lift every launch on replay inside the context.

    Args:
        data: the tensors whose values the formula is about: floating-point, contiguous, CPU.
        others: the other tensors of the call: scalars and counters.
    """
    lift = Lift(data, others)
    memory, translation = GLOBAL.set(lift.memory), TRANSLATION.set(lifted)
    try:
        yield lift
    finally:
        GLOBAL.reset(memory)
        TRANSLATION.reset(translation)
