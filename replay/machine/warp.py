"""Instructions in which the threads of a warp exchange values: shuffles, votes, matches, redux.

Threads take part if they are at this instruction and named in the member mask. All functions get
values in the `warps` layout (rows, warps, 32) and return the same layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from twinstep.replay.dtypes import UNDEFINED, Array
from twinstep.replay.machine.lanes import Lanes

LANE = np.arange(32, dtype=np.uint32)
_EVERYBODY = np.uint32(0xFFFFFFFF)
_BITS = (np.uint32(1) << LANE).astype(np.uint32)


def shuffle(mode: str, lanes: Lanes, value: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """shfl.sync: each thread reads another's value.

    Returns:
        The values, and whether the source was in range. A source that does not take part gives
        an undefined pattern.
    """
    if b.size == 1 and c.size == 1:
        shift, bound = int(b.flat[0]) & 31, int(c.flat[0])
        threads = lanes.batch.threads
        if lanes.ids is None and threads % 32 == 0:
            places, reached = _fixed_places(mode, shift, bound, threads)
            # One value for all threads is everybody's, wherever it comes from.
            moved = value if value.shape[1] == 1 else value.take(places, axis=1)
            return moved, reached
        source, valid = _fixed_source(mode, shift, bound)
        values = lanes.warps(value)[..., source]
        present = None if lanes.ids is None else lanes.active()[..., source]
        valid = np.broadcast_to(valid, values.shape)
    else:
        source, valid = source_lane(mode, lanes.warps(b) & np.uint32(31), lanes.warps(c), LANE)
        values = np.take_along_axis(lanes.warps(value), source, axis=-1)
        present = None
        if lanes.ids is not None:
            present = np.take_along_axis(lanes.active(), source, axis=-1)
    if present is not None:
        pattern = np.uint64(UNDEFINED).astype(value.dtype)
        values = np.where(present, values, pattern)
    return lanes.unwarp(values), lanes.unwarp(valid)


@functools.cache
def _fixed_source(mode: str, b: int, c: int) -> tuple[Array, Array]:
    """`source_lane` where all threads shuffle alike: there are few such patterns."""
    return source_lane(mode, b, c, LANE)


@functools.cache
def _fixed_places(mode: str, b: int, c: int, threads: int) -> tuple[Array, Array]:
    """The same for all threads of a block: where each reads, and whether that is in range."""
    source, valid = _fixed_source(mode, b, c)
    warps = np.arange(0, threads, 32)[:, None]
    return (warps + source).reshape(-1), np.tile(valid, threads // 32)[None, :]


def source_lane(mode: str, b: Array | int, c: Array | int, lane: Array) -> tuple[Array, Array]:
    """The lane a shuffle reads from (itself when out of range) and whether it was in range."""
    own = lane.astype(np.int64)
    bound = np.asarray(c, np.int64)
    clamp, segment = bound & 31, (bound >> 8) & 31
    shift = np.asarray(b, np.int64)
    most = (own & segment) | (clamp & ~segment)
    if mode == "up":
        target = own - shift
        valid = target >= most
    elif mode == "down":
        target = own + shift
        valid = target <= most
    elif mode == "bfly":
        target = own ^ shift
        valid = target <= most
    else:
        target = (own & segment) | (shift & ~segment)
        valid = target <= most
    return np.where(valid, target, own), valid


def members(lanes: Lanes, mask: Array) -> Array:
    """Per thread the bits of the threads that take part with it."""
    active = ballot_bits(lanes.active())
    return active & lanes.warps(mask)


def _all_take_part(lanes: Lanes, mask: Array) -> bool:
    """True if every warp is here with all its threads, and every mask names them all."""
    whole_warps = lanes.ids is None and lanes.batch.threads % 32 == 0
    return whole_warps and not np.count_nonzero(mask != _EVERYBODY)


def ballot_bits(flags: Array) -> Array:
    """One bit per true lane, in every lane of the warp."""
    bits = np.where(flags, _BITS, np.uint32(0)).sum(axis=-1, keepdims=True, dtype=np.uint32)
    return np.broadcast_to(bits, flags.shape)


def vote(mode: str, lanes: Lanes, predicate: Array, mask: Array) -> Array:
    """vote.sync: ballot gives bits; all, any and uni give a predicate."""
    part = members(lanes, mask)
    yes = ballot_bits(lanes.warps(predicate)) & part
    if mode == "ballot":
        return lanes.unwarp(yes)
    result = {"all": yes == part, "any": yes != 0, "uni": (yes == part) | (yes == 0)}[mode]
    return lanes.unwarp(result)


def active_mask(lanes: Lanes) -> Array:
    """activemask: the threads that are here now."""
    return lanes.unwarp(ballot_bits(lanes.active()))


def match(mode: str, lanes: Lanes, value: Array, mask: Array) -> tuple[Array, Array]:
    """match.sync: the threads that hold the same value; for `all`, whether all of them do."""
    whole, part = lanes.warps(value), members(lanes, mask)
    equal = whole[..., :, None] == whole[..., None, :]
    bits = np.where(equal, _BITS, np.uint32(0)).sum(axis=-1, dtype=np.uint32) & part
    if mode == "any":
        return lanes.unwarp(bits), lanes.unwarp(np.ones(bits.shape, np.bool_))
    every = bits == part
    return lanes.unwarp(np.where(every, part, np.uint32(0))), lanes.unwarp(every)


def elect(lanes: Lanes, mask: Array) -> tuple[Array, Array]:
    """elect.sync: the lowest participating lane is the leader."""
    part = members(lanes, mask)
    lowest = part & (~part + np.uint32(1))
    leader = np.bitwise_count(lowest - np.uint32(1)).astype(np.uint32)
    return lanes.unwarp(leader), lanes.unwarp(leader == LANE)


def reduce(combine: Callable[..., Array], lanes: Lanes, value: Array, mask: Array) -> Array:
    """redux.sync: an associative function over the participating threads."""
    whole = lanes.warps(value)
    if isinstance(combine, np.ufunc) and _all_take_part(lanes, mask):
        total = combine.reduce(whole, axis=-1, keepdims=True, dtype=whole.dtype)
        return lanes.unwarp(np.repeat(total, 32, axis=-1))
    part = members(lanes, mask)
    result = np.zeros_like(whole)
    for group in np.unique(part):
        chosen = [lane for lane in range(32) if int(group) >> lane & 1]
        if not chosen:
            continue
        total = whole[..., chosen[0]]
        for lane in chosen[1:]:
            total = combine(total, whole[..., lane])
        result = np.where(part == group, total[..., None], result)
    return lanes.unwarp(result)


def block_reduce(mode: str, lanes: Lanes, predicate: Array) -> Array:
    """bar.red: count, and, or of a predicate over the threads of each block that are here."""
    flags, active = lanes.warps(predicate), lanes.active()
    votes = (flags & active).sum(axis=(1, 2), keepdims=True)
    here = active.sum(axis=(1, 2), keepdims=True)
    result = {"popc": votes.astype(np.uint32), "and": votes == here, "or": votes > 0}[mode]
    return lanes.unwarp(np.broadcast_to(result, flags.shape))
