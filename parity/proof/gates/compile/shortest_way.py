"""The shortest way round a compiled loop: what most elements go through, whatever happens to a few.

A kernel in CUDA C++ takes rare numbers apart inside its main loop, with loops and barriers of a
warp's own; those are branches off the way that is counted here.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from twinstep.parity.proof.gates.compile.main_loop import Instruction, wide_bytes

# Kernels in Triton whose main loop holds a masked way beside the wide one. Only SASS is read so.
KERNELS = ("lamb_weights_kernel", "apex_lamb_weights_kernel")
# Instructions that a call stands for: the way without one is the usual one. A guarded one leaves a
# loop for sm_80.
CALL = 1000
WIDE = 16  # bytes of a load that only elements are read with: a pointer table's entries have 8
Edges = Sequence[Sequence[int]]


def main_loop(code: Sequence[Instruction]) -> list[Instruction]:
    """The shortest way round the innermost loop that reads the most in wide accesses.

    Args:
        code: of one kernel.

    Returns:
        The way, from the loop's head on; empty where no loop has a wide load.
    """
    wide = {at for at, one in enumerate(code) if one.loaded >= WIDE}
    if not wide:
        return []
    after = _successors(code)
    loops = {head: body for head, body in _loops(after).items() if body & wide}
    ways = [
        [code[at] for at in _way(code, after, head, body, body & wide)]
        for head, body in loops.items()
        if not any(other < body for other in loops.values())
    ]
    return max(ways, key=wide_bytes, default=[])


def _successors(code: Sequence[Instruction]) -> list[list[int]]:
    places = {one.place: at for at, one in enumerate(code)}
    found = []
    for at, one in enumerate(code):
        next_ = [at + 1] if one.falls_through and at + 1 < len(code) else []
        found.append(next_ + ([places[one.target]] if one.target in places else []))
    return found


def _loops(after: Edges) -> dict[int, set[int]]:
    """Natural loops: head -> all from which an edge back to the head is reached."""
    before: list[list[int]] = [[] for _ in after]
    for at, ends in enumerate(after):
        for end in ends:
            before[end].append(at)
    dominators = _dominators(after, before)
    found: dict[int, set[int]] = {}
    for at, ends in enumerate(after):
        for head in ends:
            if dominators[at] >> head & 1:
                body = found.setdefault(head, {head})
                body |= _reaching(at, body, before)
    return found


def _reaching(start: int, body: set[int], before: Edges) -> set[int]:
    """What leads to `start` without passing what is in the body."""
    found, waiting = {*body}, [start]
    while waiting:
        at = waiting.pop()
        if at not in found:
            found.add(at)
            waiting += before[at]
    return found


def _dominators(after: Edges, before: Edges) -> list[int]:
    """For each instruction, as bits, those that every way from the entry to it passes.

    An instruction that is not reached has none.
    """
    order = list(_preorder(after))
    reached = set(order)
    found = [0] * len(after)
    for at in order:
        found[at] = -1
    found[0] = 1
    changed = True
    while changed:
        changed = False
        for at in order[1:]:
            common = -1
            for one in before[at]:
                if one in reached:
                    common &= found[one]
            common |= 1 << at
            changed |= common != found[at]
            found[at] = common
    return found


def _preorder(after: Edges) -> Iterator[int]:
    seen, waiting = set[int](), [0] if after else []
    while waiting:
        at = waiting.pop()
        if at not in seen:
            seen.add(at)
            yield at
            waiting += reversed(after[at])


def _way(
    code: Sequence[Instruction], after: Edges, head: int, body: set[int], wide: set[int]
) -> list[int]:
    """The shortest way from the head back to it that passes a wide load."""
    out = _ways_from(code, after, head, body)
    ways = []
    for load in wide & out.keys():
        back = out if load == head else _ways_from(code, after, load, body)
        closing = [way for at, way in back.items() if head in after[at]]
        if closing:
            ways.append([*out[load][:-1], *min(closing, key=lambda way: _length(code, way))])
    return min(ways, key=lambda way: _length(code, way), default=[])


def _ways_from(
    code: Sequence[Instruction], after: Edges, start: int, body: set[int]
) -> dict[int, list[int]]:
    """The shortest way to each instruction of the body, both ends included."""
    found: dict[int, list[int]] = {}
    waiting: list[tuple[int, int, list[int]]] = [(0, start, [start])]
    while waiting:
        length, at, way = heapq.heappop(waiting)
        if at in found:
            continue
        found[at] = way
        for end in after[at]:
            if end in body and end not in found:
                heapq.heappush(waiting, (length + _cost(code[at]), end, [*way, end]))
    return found


def _length(code: Sequence[Instruction], way: Sequence[int]) -> int:
    return sum(_cost(code[at]) for at in way)


def _cost(one: Instruction) -> int:
    return CALL if one.mnemonic.startswith("CALL") and not one.guarded else 1
