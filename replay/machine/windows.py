"""Strict provenance: each tensor at addresses of its own, far from those of any other.

The kernel is given other addresses than the real ones, so that arithmetic on the address of one
tensor cannot lead into another. Parameters are moved before a launch. An address that is loaded
from memory is a real one: it is moved to the tensor that it points at, where it may be used as an
address; and what is stored is moved back. An address that comes by another way (an atomic, halves)
stays real, and may reach any tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from twinstep.replay.dtypes import Array, width
from twinstep.replay.machine.memory import Extents, Member, Region, Regions, span
from twinstep.replay.machine.program import Program
from twinstep.replay.ptx.flow import defined, family, registers_in, used
from twinstep.replay.ptx.syntax import Mem

FIRST = 1 << 56
SPACING = 1 << 40
"""Distance of two windows. A tensor lies in the middle, with the low bits of its real address."""

LARGE = 1 << 28
"""Bytes of a view above which its gaps are not told from its elements."""

_ADDRESS_BITS = np.uint64(40)
_LOADS = frozenset({"ld", "ldu"})


Layout = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, stride and bytes of an element."""
Key = tuple[int, int, Layout | None]
"""Start and size of a tensor, and where its elements are if that is not everywhere."""


class Windows(Regions):
    """Regions, and besides a window for each tensor whose address the kernel is given.

    Args:
        tensors: See `Regions`.
        extra: See `Regions`.
    """

    def __init__(
        self,
        tensors: Sequence[Extents],
        extra: Sequence[tuple[str, int, int, object]] = (),
    ) -> None:
        super().__init__(tensors, extra)
        self.homes = len(self.starts)
        self.low, self.high = (self.starts[0], self.ends[-1]) if self.homes else (1, 0)
        self.window_of: dict[Key, Region] = {}
        self.inside: dict[int, dict[Key, list[Member]]] = {}
        self.gaps = False
        self.known: dict[int, int] = {}

    def _window(self, key: Key) -> Region:
        """The window of a tensor, made when it is first asked for.

        A launch knows hundreds of tensors, and there may be one launch for each of them.
        """
        if key in self.window_of:
            return self.window_of[key]
        real, size, sparse = key
        start = FIRST + len(self.window_of) * SPACING + SPACING // 2 + real % 2**32
        home = self.find(real, real + size)
        assert home is not None
        window = self._add(start, start + size, self._inside(home)[key])
        window.shift, window.home = real - start, home
        if sparse is not None and size <= LARGE:
            window.elements = _elements(sparse, size)
        self.gaps |= window.elements is not None
        self.window_of[key] = window
        return window

    def _inside(self, home: Region) -> dict[Key, list[Member]]:
        """The tensors in a region, those with the same elements together, in their order."""
        if home.index not in self.inside:
            found = self.inside[home.index] = dict[Key, list[Member]]()
            for member in sorted(home.members, key=lambda member: member.place):
                if isinstance(member.keeper, torch.Tensor):
                    found.setdefault(_key(member.keeper), []).append(member)
        return self.inside[home.index]

    def parameter(self, address: int, tensors: list[torch.Tensor]) -> int:
        """An address among the parameters, moved.

        Args:
            address: Any number.
            tensors: Those passed by address, in their order; the one that is meant is taken out.
        """
        for place, tensor in enumerate(tensors):
            if tensor.data_ptr() == address and tensor.numel():
                del tensors[place]
                return address - self._window(_key(tensor)).shift
        return self.moved_one(address)

    def moved_one(self, address: int) -> int:
        """A real address, or that of the end of a tensor, in the window of the widest tensor."""
        if address not in self.known:
            home, widest, shift = self.find(address, address), -1, 0
            for key in self._inside(home) if home is not None else ():
                start, whole, _ = key
                size = whole if address < start + whole else 0
                if start <= address <= start + whole and size > widest:
                    widest, shift = size, self._window(key).shift
            self.known[address] = address - shift
        return self.known[address]

    def moved(self, words: Array) -> Array:
        """Loaded words, those that are real addresses of tensors moved."""
        if words.size == 1:
            word = int(words.item())
            near_one = self.low <= word <= self.high
            return np.full(words.shape, self.moved_one(word), np.uint64) if near_one else words
        near = (words >= np.uint64(self.low)) & (words <= np.uint64(self.high))
        return _each(words, near, self.moved_one)

    def real(self, words: Array) -> Array:
        """Words to store, those that lie in a window moved back."""
        place = words >> _ADDRESS_BITS
        first = FIRST // SPACING
        near = (place >= np.uint64(first)) & (place < np.uint64(first + len(self.window_of)))
        return _each(words, near, self._real_one)

    def _real_one(self, address: int) -> int:
        window = self.region(self.homes + (address - FIRST) // SPACING)
        return address + window.shift if window.start <= address <= window.end else address


def _each(words: Array, chosen: Array, function: Callable[[int], int]) -> Array:
    """Words with those that are chosen replaced by a function of them."""
    if not np.count_nonzero(chosen):
        return words
    result = words.copy()
    values, places = np.unique(words[chosen], return_inverse=True)
    new = np.array([function(value) for value in values.tolist()], np.uint64)
    result[chosen] = new[places.reshape(-1)]
    return result


def _key(tensor: torch.Tensor) -> Key:
    size, whole = tensor.element_size(), span(tensor)
    dense = tensor.numel() * size == whole
    return tensor.data_ptr(), whole, None if dense else (tensor.shape, tensor.stride(), size)


def _elements(layout: Layout, whole: int) -> Array | None:
    """Flags of the bytes of a view that belong to an element; None if all do."""
    shape, stride, size = layout
    flags = np.zeros((whole // size, size), np.bool_)
    as_strided(flags, (*shape, size), (*(step * size for step in stride), 1))[...] = True
    return None if flags.all() else flags.reshape(-1)


def moved_parameters(
    program: Program, params: bytes, tensors: Iterable[torch.Tensor], windows: Windows
) -> bytes:
    """Parameter bytes with every address moved, in structures too."""
    data, waiting = bytearray(params), list(tensors)
    for variable, kind in program.kernel.params:
        start = program.layout.params[variable.name]
        if variable.size == 8 and kind[0] == "f":
            continue
        for at in range(-(-start // 8) * 8, start + variable.size - 7, 8):
            word = int.from_bytes(data[at : at + 8], "little")
            data[at : at + 8] = windows.parameter(word, waiting).to_bytes(8, "little")
    return bytes(data)


@cache
def address_loads(program: Program) -> frozenset[int]:
    """The `id` of each load of 64-bit words that an address may be computed from."""
    code = program.kernel.code
    wanted: set[str] = set()
    for instruction in code:
        for operand in instruction.operands:
            if isinstance(operand, Mem):
                wanted.update(registers_in(operand))
    found: set[int] = set()
    before = -1
    while before != len(wanted):
        before = len(wanted)
        for instruction in code:
            if wanted.isdisjoint(defined(instruction)):
                continue
            if family(instruction) not in _LOADS:
                wanted.update(used(instruction))
            elif "param" not in instruction.parts and width(instruction.parts[-1]) == 8:
                found.add(id(instruction))
    return frozenset(found)
