"""Functions that the code of a lifted kernel calls: the memory of the launch, sums in memory."""

from __future__ import annotations

import threading
from contextvars import ContextVar

import numpy as np

from twinstep.replay.dtypes import Array
from twinstep.replay.machine.lanes import Lanes
from twinstep.replay.shadow64.memory import ShadowMemory, access, load, store
from twinstep.replay.shadow64.values import TAINT, Shadow, lane_value, plain

GLOBAL: ContextVar[ShadowMemory | None] = ContextVar("shadows of global memory", default=None)
_SITES: dict[str, int] = {}
_LOCK = threading.Lock()

__all__ = ["access", "atomic", "kept", "load", "memory", "site_number", "store"]


def site_number(text: str) -> int:
    """The number under which taints name an instruction."""
    with _LOCK:
        return _SITES.setdefault(text, len(_SITES))


def site_text(number: int) -> str:
    """The instruction of a number."""
    with _LOCK:
        found = [text for text, own in _SITES.items() if own == number]
    return found[0] if found else "an unknown instruction"


def kept(shadow: Shadow, g: int) -> Array:
    """A shadow for the register file."""
    return plain(g) if shadow is None else shadow


def memory(lanes: Lanes, space: str) -> ShadowMemory:
    """The shadows of global memory, or of a batch's shared or local memory."""
    if space in ("shared", "local"):
        own: dict[str, ShadowMemory] = vars(lanes.batch).setdefault("shadows", {})
        return own.setdefault(space, ShadowMemory())
    found = GLOBAL.get()
    if found is None:
        raise RuntimeError("a lifted kernel runs outside twinstep.replay.shadow64.lift.lifting")
    return found


def atomic(
    where: ShadowMemory,
    lanes: Lanes,
    flat: Array,
    start: Array,
    kind: str,
    space: str,
    bits: Array,
    shadow: Shadow,
    lifted: bool,
    site: int,
) -> None:
    """Add wide values to memory, after the narrow ones; or taint it."""
    size = {"f32": 4, "f64": 8}.get(kind, bits.dtype.itemsize)
    g = size // 2
    places, inverse = np.unique(start, return_inverse=True)
    after = _found(lanes, space, places, size)
    granular = (places[:, None] + np.arange(g)).reshape(-1)
    own = np.zeros((len(flat), g)), np.zeros((len(flat), g), np.uint8)
    if shadow is not None:
        whole = np.broadcast_to(shadow, lanes.shape).reshape(-1)[flat]
        own = whole["w"], whole["k"]
    wide, kinds = where.last(granular)
    wide, kinds = wide.reshape(-1, g), kinds.reshape(-1, g)
    touched = np.zeros(len(places), np.bool_)
    np.logical_or.at(touched, inverse, (own[1] != 0).any(-1))
    touched |= (kinds != 0).any(-1)
    if not touched.any():
        where.store(granular, np.zeros(granular.size), np.zeros(granular.size), after, True)
        return
    spoiled = ((own[1] != 0) & (own[1] != g) & (own[1] != 254)).any()
    if lifted and not spoiled and not (kinds == TAINT).any():
        total = np.where(kinds[:, 0] == g, wide[:, 0], where.numbers(granular, kind))
        exact = lane_value(np.broadcast_to(bits, lanes.shape).reshape(-1)[flat][None], kind, 0)[0]
        added = np.where(own[1][:, 0] == g, own[0][:, 0], exact)
        np.add.at(total, inverse, added)
        marks = np.where(touched[:, None], np.array([g] + [254] * (g - 1), np.uint8), 0)
    else:
        total, marks = np.full(len(places), float(site)), np.full((len(places), g), TAINT)
    values = np.repeat(total[:, None], g, axis=1)
    where.store(granular, values.reshape(-1), marks.reshape(-1), after, True)


def _found(lanes: Lanes, space: str, places: Array, size: int) -> Array:
    """The bits now in memory, as granules."""
    g = size // 2
    result = np.zeros((len(places), g), np.uint16)
    if space == "shared":
        words = lanes.batch.shared.reshape(-1).view(np.uint16)
        row, offset = places >> 32, places & 0xFFFFFFFF
        index = row * (lanes.batch.shared.shape[1] // 2) + offset
        return np.asarray(words[index[:, None] + np.arange(g)].reshape(-1))
    for at, place in enumerate(places.tolist()):
        region = lanes.batch.regions.find(2 * place, 2 * place + size)
        if region is not None:
            words, first = region.words(2, 2)
            begin = (2 * place - first) // 2
            result[at] = words[begin : begin + g]
    return result.reshape(-1)
