"""Every size: each element is written once, nothing else is, and nothing outside is read.

A kernel is launched on tensors of many sizes that take no memory, and not run: what is looked at
are its compiled variants, its grid and its arguments. Each variant then runs on affine integers
(`affine`), once for each number of elements that the last program may have, and once for a program
with a whole chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twinstep.parity.prove.affine import Branch, Machine, NotAffine
from twinstep.parity.prove.affine_values import KNOWN, Bounds, Value, number
from twinstep.parity.prove.situations import Situation
from twinstep.parity.prove.sizes_launches import Variant, launch
from twinstep.parity.registry.engines import engine_for, running
from twinstep.replay.dtypes import Array
from twinstep.replay.ptx.syntax import Instruction

MOST = 1 << 40
NARROW = (1 << 31) - 1
PROBES = (1, 2, 15, 16, 17, 127, 150, 1024, 4096, 4097, 4300, 65_539, 1 << 20, NARROW, 1 << 31,
          (1 << 31) + 16, (1 << 33) + 5, MOST - 1, MOST)  # fmt: skip
"""Sizes at which a kernel is launched, and not run."""
SMALL = 48
"""Elements of the case whose tensors are stretched: no operation has as many of anything else."""
LANES = 1 << 15
LARGE = 1 << 16
SIDES = 16
"""Most sides of branches on data that are followed."""


class Wrong(Exception):
    """An element is not written once, or memory outside is touched.

    Attributes:
        size: number of elements at which.
    """

    def __init__(self, text: str, size: int) -> None:
        super().__init__(text)
        self.size = size


@dataclass(frozen=True)
class Extent:
    """Memory of one argument.

    Attributes:
        name: of it.
        width: bytes of an element, for a tensor of n; else 0.
        fixed: bytes of any other tensor.
        written: each element must be written once.
    """

    name: str
    width: int
    fixed: int
    written: bool


@dataclass(frozen=True)
class Found:
    """Scope of a proof.

    Attributes:
        most: the largest size.
        variants: compiled kernels that were followed.
        chunks: elements of a program, of each.
        skipped: branches on data beyond which nothing is written.
        probes: sizes that were launched.
    """

    most: int
    variants: int
    chunks: tuple[int, ...]
    skipped: tuple[str, ...]
    probes: int


def prove_sizes(situation: Situation) -> Found:
    """Prove the addresses of a kernel on one flat tensor for every size.

    Raises:
        NotAffine: an address, a branch, a grid or an argument is no affine expression.
        Wrong: an element is not written once, or something else is touched.
    """
    engine = engine_for(situation.kernel)
    if engine.name != "replay" or engine.missing:
        raise NotAffine(engine.missing or "it is no compiled kernel that replay runs")
    variants: dict[tuple[int, str], Variant] = {}
    with running(engine):
        for size in PROBES:
            launch(situation, size, variants)
    writes = set(situation.kernel.operation.writes)
    written: dict[int, set[str]] = {size: set() for size in PROBES}
    chunks: dict[int, None] = {}
    most = MOST
    skipped: dict[str, None] = {}
    for variant in variants.values():
        grids = {
            size: request.grid
            for other in variants.values()
            if other.position == variant.position
            for size, request in other.requests.items()
        }
        own = _Proof(variant, grids, writes)
        own.run()
        chunks |= dict.fromkeys([own.chunk] if own.covered else [])
        most = min(most, own.chunk * NARROW)
        skipped |= dict.fromkeys(own.skipped if own.covered else [])
        for size in variant.requests:
            again = written[size] & own.covered
            if again:
                raise NotAffine(f"{min(again)} is written by two launches")
            written[size] |= own.covered
    needed = {
        f"{name}[0]"
        for name, tensors in situation.case().lists.items()
        if name in writes and tensors and tensors[0].numel() == situation.sizes[0]
    }
    for size, names in written.items():
        if needed - names:
            raise Wrong(f"{min(needed - names)} is not written", size)
    return Found(most, len(variants), tuple(chunks), tuple(skipped), len(PROBES))


class _Proof:
    """The proof of one variant."""

    def __init__(
        self, variant: Variant, grids: dict[int, tuple[int, int, int]], writes: set[str]
    ) -> None:
        self.variant = variant
        self.sizes = sorted(variant.requests)
        first = variant.requests[self.sizes[0]]
        self.kernel = first.program.kernel
        self.threads = first.block[0]
        wide = self.sizes[-1] > NARROW
        self.most = MOST if wide else NARROW if self.sizes[-1] > 1 else 1
        self.step = 16 if all(size % 16 == 0 for size in self.sizes) else 1
        self.single = False
        self.chunk = self._grid(grids)
        # A grid has less than 2^31 programs.
        self.most = min(self.most, self.chunk * NARROW)
        self.extents = self._extents(writes)
        self.bounds = Bounds(self.chunk, self.most)
        self.covered: set[str] = set()
        self.skipped: list[str] = []
        self.signature = 0
        self.read: set[int] = set()
        self.wrote: set[int] = set()

    def _grid(self, grids: dict[int, tuple[int, int, int]]) -> int:
        """Elements of one program; 0 if one program does it all."""
        if any(grid[1:] != (1, 1) for grid in grids.values()):
            raise NotAffine("a grid of more than one axis")
        if all(grid[0] == 1 for grid in grids.values()) and len(grids) == len(PROBES):
            self.single = True
            return 2 * MOST
        largest = max(grids)
        low = -(-largest // grids[largest][0])
        for chunk in (1 << (low - 1).bit_length(), low):
            if all(-(-size // chunk) == grid[0] for size, grid in grids.items()):
                return chunk
        raise NotAffine(f"a grid that is not ceil(n / chunk): {grids}")

    def _extents(self, writes: set[str]) -> list[Extent]:
        rows = {size: self.variant.tensors[size] for size in self.sizes}
        found = []
        for index, (name, tensor) in enumerate(rows[self.sizes[0]]):
            width = tensor.element_size()
            counts = {size: row[index][1].numel() for size, row in rows.items()}
            grows = all(count == size for size, count in counts.items())
            if not grows and len(set(counts.values())) > 1:
                raise NotAffine(f"{name} has neither n elements nor always as many")
            grows = grows and tensor.dim() > 0
            own = name.partition("[")[0] in writes and grows
            fixed = 0 if grows else min(counts.values()) * width
            found.append(Extent(name, width if grows else 0, fixed, own))
        return found

    # --- parameters ------------------------------------------------------------------------

    def _parameters(self, size: Value) -> dict[str, Value]:
        """Values of parameters: places in tensors, constants, and the size."""
        found = {}
        layout = self.variant.requests[self.sizes[0]].program.layout
        for variable, kind in self.kernel.params:
            start = layout.params[variable.name]
            if kind[0] == "f":
                continue
            values = {
                n: int.from_bytes(request.params[start : start + variable.size], "little")
                for n, request in self.variant.requests.items()
            }
            value = self._address(values)
            if value is None and all(v == n for n, v in values.items()):
                value = size
            if value is None and len(set(values.values())) == 1:
                value = number(next(iter(values.values())))
            if value is None:
                raise NotAffine(f"parameter {variable.name} is neither the size nor a constant")
            found[variable.name] = value
        return found

    def _address(self, values: dict[int, int]) -> Value | None:
        places = set()
        for size, value in values.items():
            for index, (_, tensor) in enumerate(self.variant.tensors[size]):
                start = tensor.data_ptr()
                if start <= value < start + max(tensor.numel() * tensor.element_size(), 1):
                    places.add((index, value - start))
                    break
            else:
                return None
        if len(places) != 1:
            return None
        index, offset = places.pop()
        return number(offset, tag=index)

    # --- running ---------------------------------------------------------------------------

    def run(self) -> None:
        """Run every class of programs, on every side of branches on data."""
        whole = min(self.chunk, self.most)
        # One program for all sizes has at least one element.
        rests = [1] if self.single else list(range(self.step, whole + 1, self.step))
        if len(rests) > LARGE:
            raise NotAffine(f"chunks of more than {LARGE} elements")
        each = max(1, LANES // self.threads)
        groups = [rests[i : i + each] for i in range(0, len(rests), each)]
        queue: list[dict[int, bool]] = [{}]
        own: set[int] = set()
        signatures: dict[tuple[tuple[int, bool], ...], int] = {}
        done = 0
        while queue:
            sides = queue.pop()
            try:
                nothing = self._side(groups, sides)
            except Branch as branch:
                own |= {branch.at} if branch.own else set()
                if done + len(queue) > SIDES:
                    raise NotAffine(f"more than {SIDES} sides of branches on data") from None
                queue += [{**sides, branch.at: side} for side in (True, False)]
                continue
            done += 1
            # Where threads have sides of their own, each must write the same on all of them.
            shared = tuple((at, side) for at, side in sorted(sides.items()) if at not in own)
            scalars = {n for n in self.read & self.wrote if not self.extents[n].width}
            if shared and scalars and not self.single:
                name = self.extents[min(scalars)].name
                raise NotAffine(f"a branch may depend on {name}, which the kernel also writes")
            if signatures.setdefault(shared, self.signature) != self.signature:
                raise NotAffine("which elements are written depends on data of each thread")
            if nothing and sides:
                last = self.kernel.code[list(sides)[-1]]
                self.skipped.append(f"`{last.text}`, {last.place}")

    def _side(self, groups: Sequence[Sequence[int]], sides: dict[int, bool]) -> bool:
        """Run all programs on one side; True if it writes no element."""
        covered: set[str] | None = None
        self.signature, self.read, self.wrote = 0, set(), set()
        for group in groups:
            own = self._group(np.array(group), sides, self.single)
            covered = own if covered is None else covered
            if covered != own:
                raise NotAffine("elements are written by some programs only")
        if self.most > self.chunk and not self.single:
            own = self._group(np.array([self.chunk]), sides, True)
            if own != covered:
                raise NotAffine("elements are written by some programs only")
        self.covered |= covered or set()
        return not covered

    def _group(self, rests: Array, sides: dict[int, bool], excess: bool) -> set[str]:
        """Run programs with these numbers of elements; the tensors that they write whole."""
        lanes = len(rests) * self.threads
        rest = np.repeat(rests, self.threads)
        class_ = np.repeat(np.arange(len(rests)), self.threads)
        size = number(rest, self.chunk, int(excess))
        counts = {
            index: np.zeros((len(rests), self.chunk), np.int32)
            for index, extent in enumerate(self.extents)
            if extent.written and not self.single
        }

        def access(
            what: str, i: Instruction, mask: Array, where: Value, count: int, maybe: bool
        ) -> None:
            shown = f"`{i.text}`, {i.place}"
            state, tag, a, b, c, n = (
                np.broadcast_to(x, mask.shape)[mask]
                for x in (where.state, where.tag, where.a, where.b, where.c, rest)
            )
            if (state != KNOWN).any() or (tag < 0).any():
                raise NotAffine(f"an address is not affine: {shown}")
            for index in np.unique(tag).tolist():
                on = tag == index
                extent = self.extents[index]
                end = Value(
                    n[on] * extent.width + extent.fixed - a[on] - count,
                    self.chunk * extent.width - b[on],
                    int(excess) * extent.width - c[on],
                    tag[on], state[on],
                )  # fmt: skip
                start = Value(a[on], b[on], c[on], tag[on], state[on])
                outside = (self.bounds.low(end) < 0) | (self.bounds.low(start) < 0)
                if outside.any():
                    at = int(n[on][np.argmax(outside)])
                    raise Wrong(f"{extent.name} is {what} outside of its elements: {shown}", at)
                (self.wrote if what == "write" else self.read).add(index)
                if what == "write" and extent.written and self.single:
                    raise NotAffine(f"one program writes all elements: {shown}")
                if what == "write" and index in counts:
                    if maybe:
                        raise NotAffine(f"data decides whether an element is written: {shown}")
                    width = extent.width
                    if (b[on] != width * self.chunk).any() or c[on].any() or (a[on] % width).any():
                        raise NotAffine(f"elements beyond those of the program: {shown}")
                    for part in range(count // width):
                        place = a[on] // width + part
                        if (place < 0).any() or (place >= self.chunk).any():
                            raise NotAffine(f"elements of another program are written: {shown}")
                        np.add.at(counts[index], (class_[mask][on], place), 1)
                        lane = np.flatnonzero(mask)[on]
                        self.signature += _mixed(index, lane, place)

        Machine(
            self.kernel,
            self.bounds,
            self._parameters(size),
            self._special(lanes),
            lanes,
            access,
            sides,
        ).run()
        found: set[str] = set()
        if not counts:
            return found
        inside = np.arange(self.chunk) < rests[:, None]
        for index, count in counts.items():
            if not count.any():
                continue
            odd = count != inside
            if odd.any():
                row, place = np.unravel_index(int(np.argmax(odd)), odd.shape)
                times = f"{int(count[row, place])} times"
                name = self.extents[index].name
                raise Wrong(f"element {place} of {name} is written {times}", int(rests[row]))
            found.add(self.extents[index].name)
        return found

    def _special(self, lanes: int) -> dict[str, Value]:
        """Thread and program."""
        thread = np.tile(np.arange(self.threads), lanes // self.threads)
        found = {"tid.x": number(thread), "ctaid.x": number(0, 1), "ntid.x": number(self.threads)}
        found |= dict.fromkeys(("tid.y", "tid.z", "ctaid.y", "ctaid.z"), number(0))
        return found


def _mixed(index: int, lane: Array, place: Array) -> int:
    """A sum of hashes of writes, whatever their order."""
    word = (lane.astype(np.uint64) << np.uint64(32)) + place.astype(np.uint64)
    word += np.uint64(index + 1) << np.uint64(56)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (word ^ (word >> np.uint64(shift))) * np.uint64(factor)
    return int((word ^ (word >> np.uint64(31))).sum())
