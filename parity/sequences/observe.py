"""All that can be seen of an optimizer: every tensor and number that is reachable from it.

An observation is flat: a path such as `optimizer.state[params[0]].step` and what stands there.
Tensors are known by dtype, shape, device, bits, and by the first path that shares their storage.
Needs torch alone: stand-alone repro files carry this module with them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PLAIN = (bool, int, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
NAMES = {kind: kind.__name__ for kind in (float, *PLAIN)}

ADDRESS = re.compile(" at 0x[0-9a-f]+")
MOVED = "in other memory than before"


class Leaf(NamedTuple):
    """Observed value at a path.

    Attributes:
        says: everything but a tensor's elements, as text.
        tensor: the elements, on the CPU. They are no copy where the tensor is there already: an
            observation is to be compared before anything else happens to what it shows.
        moved: True if the tensor was there at the last observation, elsewhere in memory.
    """

    says: str
    tensor: Tensor | None = None
    moved: bool = False


Observation = dict[str, Leaf]
# Address of a tensor by path; its storage is kept, so that its memory becomes no other tensor's.
Places = dict[str, tuple[int, object]]


@dataclass(frozen=True)
class Difference:
    """A path at which two observations differ.

    Attributes:
        path: of an element, where elements differ.
        got: what is there.
        want: what should be.
        size: in ULP, of integers the difference; 0 if more than an element differs.
        differ: how many elements do, in words.
    """

    path: str
    got: str
    want: str
    size: float = 0.0
    differ: str = ""


@dataclass
class Walk:
    """Walks objects and writes down what it meets.

    Attributes:
        home: device that counts as "here"; any other is named.
        skipped: paths that are left out.
        offloads: the CPU counts as "here", too.
        overlap: tensors are grouped by the bytes they have in common, not by storage.
        before: places of tensors at the last observation.
    """

    home: torch.device
    skipped: frozenset[str] = frozenset()
    offloads: bool = False
    overlap: bool = False
    before: Places = field(default_factory=dict)
    places: Places = field(default_factory=dict)
    leaves: Observation = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)
    storages: dict[tuple[int, int], str] = field(default_factory=dict)
    alive: list[object] = field(default_factory=list)

    def root(self, name: str, value: object) -> None:
        """Walk everything reachable from a value; earlier roots name what is shared."""
        self._visit(value, name)

    def _visit(self, value: object, path: str) -> None:
        if path in self.skipped:
            return
        kind = type(value)
        if kind is str:
            # torch makes of a text in a state the name of a generator, with its address.
            self.leaves[path] = Leaf(f"str {ADDRESS.sub('', repr(value))}")
        elif kind in NAMES:
            self.leaves[path] = Leaf(f"{NAMES[kind]} {value!r}")
        elif kind is dict or kind is list or kind is tuple:
            self._branch(value, path)
        elif isinstance(value, Tensor):
            self._tensor(value, path)
        else:
            self._other(value, path)

    def _other(self, value: object, path: str) -> None:
        if isinstance(value, Enum):
            self.leaves[path] = Leaf(f"enum {value.name}")
        elif isinstance(value, float):
            self.leaves[path] = Leaf(f"float {value!r}")
        elif isinstance(value, PLAIN):
            self.leaves[path] = Leaf(f"{type(value).__name__} {value!r}")
        elif isinstance(value, set | frozenset):
            self.leaves[path] = Leaf(f"set {sorted(map(repr, value))}")
        elif isinstance(value, RemovableHandle):
            # Its number counts every hook of the process.
            self.leaves[path] = Leaf("hook")
        elif isinstance(value, ProcessGroup):
            self.leaves[path] = Leaf(f"process group {value!r}")
        elif callable(value):
            self.leaves[path] = Leaf("callable")
        else:
            self._branch(value, path)

    def _branch(self, value: object, path: str) -> None:
        if not isinstance(value, tuple):
            if id(value) in self.paths:
                self.leaves[path] = Leaf(f"the same object as {self.paths[id(value)]}")
                return
            self.paths[id(value)] = path
            # An object that dies during the walk would give its id to another.
            self.alive.append(value)
        if isinstance(value, dict | Mapping):
            words = ", ".join(sorted([key for key in value if isinstance(key, str)]))
            self.leaves[path] = Leaf(
                f"dict of {len(value)}: {words}" if words else f"dict of {len(value)}"
            )
            for key, item in value.items():
                self._visit(item, f"{path}.{key}" if type(key) is str else self._key(key, path))
        elif isinstance(value, list | tuple | Sequence):
            kind = "tuple" if isinstance(value, tuple) else "list"
            self.leaves[path] = Leaf(f"{kind} of {len(value)}")
            for at, item in enumerate(value):
                self._visit(item, f"{path}[{at}]")
        else:
            self.leaves[path] = Leaf("object")
            for name, item in attributes(value):
                self._visit(item, f"{path}.{name}")

    def _key(self, key: object, path: str) -> str:
        if isinstance(key, str):
            return f"{path}.{key}"
        named = self.paths.get(id(key), "a stranger") if isinstance(key, Tensor) else repr(key)
        return f"{path}[{named}]"

    def _tensor(self, value: Tensor, path: str) -> None:
        if id(value) in self.paths:
            self.leaves[path] = Leaf(f"the same tensor as {self.paths[id(value)]}")
            return
        self.paths[id(value)] = path
        self.alive.append(value)
        here = (self.home.type, *("cpu",) * self.offloads)
        place = "" if value.device.type in here else f" on {value.device}"
        kind = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
        says = f"{kind} {str(value.dtype)[6:]} {tuple(value.shape)}{place}"
        if value.requires_grad:
            says += " with gradient"
        if value.layout is not torch.strided:
            says += f", {value.layout}"
            self.leaves[path] = Leaf(says, value.detach().to_dense().cpu())
            return
        moved = False
        if value.numel():
            storage, address = value.untyped_storage(), value.data_ptr()
            shared = self._shared(value, storage.data_ptr(), path)
            says += f", shares memory with {shared}" if shared != path else ""
            moved = path in self.before and self.before[path][0] != address
            self.places[path] = address, storage
        self.leaves[path] = Leaf(says, value.detach().cpu().contiguous(), moved)
        if path.startswith("optimizer.") and value.is_leaf and value.grad is not None:
            # Those of the parameters have come before, with the parameters.
            self.leaves[f"{path}.grad"] = Leaf("a gradient that stays")

    def _shared(self, value: Tensor, storage: int, path: str) -> str:
        if not self.overlap:
            return self.storages.setdefault((storage, 0), path)
        low, high = extent(value)
        for (start, stop), name in self.storages.items():
            if low < stop and start < high:
                return name
        self.storages[low, high] = path
        return path


def extent(value: Tensor) -> tuple[int, int]:
    """First address of a tensor, and the first past it."""
    steps = zip(value.shape, value.stride(), strict=True)
    reach = sum((size - 1) * step for size, step in steps)
    start = value.data_ptr()
    return start, start + (reach + 1) * value.element_size()


def attributes(value: object) -> Iterable[tuple[str, object]]:
    """Names and values of an object's attributes, slots included, in a fixed order."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and not name.startswith("__"):
                found[name] = getattr(value, name)
    return sorted(found.items())


def differing(got: Tensor, want: Tensor) -> Tensor:
    """Mask of differing bits; the payload of a NaN does not count."""
    if got.dtype.is_complex or got.dtype == torch.bool:
        return got != want
    integer = INTEGERS[got.element_size()]
    unequal = got.view(integer) != want.view(integer)
    if not got.dtype.is_floating_point:
        return unequal
    return unequal & ~(got.isnan() & want.isnan())


def differences(got: Observation, want: Observation) -> list[Difference]:
    """Every path that is missing, in excess, or different, in the order of the walk.

    A tensor may stay in memory where another is made anew, but not the other way round.
    """
    found = []
    for path in [*want, *(path for path in got if path not in want)]:
        one, other = got.get(path), want.get(path)
        if one is None or other is None:
            here = "nothing" if one is None else one.says
            there = "nothing" if other is None else other.says
            found.append(Difference(path, here, there))
        elif one.says != other.says:
            dicts = one.says.startswith("dict") and other.says.startswith("dict")
            keys = dicts and path != "outcome"
            lacks, more = (
                _keys(path, *pair) if keys else "" for pair in ((want, got), (got, want))
            )
            says = one.says + f"; lacks {lacks}" * bool(lacks) + f"; {more} too much" * bool(more)
            found.append(Difference(path, says, other.says))
        elif one.moved and not other.moved:
            found.append(Difference(path, MOVED, "where it was"))
        elif one.tensor is not None and other.tensor is not None:
            found += _elements(path, one.tensor, other.tensor)
    return found


def _elements(path: str, got: Tensor, want: Tensor) -> list[Difference]:
    got, want = got.reshape(-1), want.reshape(-1)
    integer = INTEGERS.get(got.element_size(), got.dtype)
    if torch.equal(got.view(integer), want.view(integer)):
        return []
    wrong = differing(got, want)
    if not bool(wrong.any()):
        return []
    sizes = torch.where(wrong, distances(got, want), -1.0)
    at = int(sizes.argmax())
    says = f"{int(wrong.sum())} of {wrong.numel()} in {path}" if wrong.numel() > 1 else ""
    return [Difference(f"{path}[{at}]", shown(got[at]), shown(want[at]), float(sizes[at]), says)]


def _keys(path: str, there: Observation, here: Observation) -> str:
    """Keys of a dict that only one of two observations has."""
    found: list[str] = []
    for name in there:
        inside = name.startswith((f"{path}.", f"{path}[")) and name not in here
        # Its entries go with a key.
        if inside and not any(name.startswith((f"{one}.", f"{one}[")) for one in found):
            found.append(name)
    return ", ".join(name.removeprefix(path).removeprefix(".") for name in found)


def distances(got: Tensor, want: Tensor) -> Tensor:
    """Distance of elements in ULP, of integers the difference; infinite from NaN to a number."""
    if got.dtype.is_complex or got.dtype == torch.bool:
        return torch.ones(got.shape, dtype=torch.float64)
    if not got.dtype.is_floating_point:
        return (got.double() - want.double()).abs().clamp_min(1.0)
    integer = INTEGERS[got.element_size()]
    lowest = torch.iinfo(integer).min
    one, other = (x.view(integer).to(torch.int64) for x in (got, want))
    one, other = (torch.where(x < 0, lowest - x, x).double() for x in (one, other))
    steps = (one - other).abs().clamp_min(1.0)
    return torch.where(got.isnan() != want.isnan(), torch.inf, steps)


def furthest(
    found: Sequence[Difference], place: Callable[[Difference], tuple[int, ...]]
) -> Difference:
    """The first difference by its place; of elements in that place the one that is furthest off."""
    first = min(found, key=place)
    if not first.size:
        return first
    alike = [row for row in found if place(row) == place(first)]
    last = max(alike, key=lambda row: row.size)
    others = sum(bool(row.size) for row in found) - 1
    more = f"elements of {others} other tensor{'s' * (others != 1)}" if others else ""
    return replace(last, differ=", and ".join(filter(None, (last.differ, more))))


def shown(element: Tensor) -> str:
    """An element as a number and as bits."""
    digits = bytes(element.reshape(1).view(torch.uint8).tolist())[::-1].hex()
    return f"{element.item()!r}  0x{digits}"
