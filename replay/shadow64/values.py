"""Wide values beside registers: what a kernel's own formula gives in float64.

A *shadow* says of every 16-bit granule of a register or of memory whether a value derived from the
tensors' data starts there, how wide it is and what it is in float64. Granules without one hold
plain bits: addresses, counters, masks, and scalars, whose own rounding is part of the definition.
Moving bits moves shadows. Arithmetic on shadowd values is done in float64 on the wide values and in
the kernel's format on the narrow ones. Taking a shadowd value for an integer and computing with it
*taints* the result: no real number goes with such bits any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from twinstep.replay.dtypes import Array
from twinstep.replay.isa.rounding import bf16_to_f32
from twinstep.replay.machine.lanes import Lanes
from twinstep.replay.machine.warp import shuffle

REST, TAINT = 254, 255
SHADOW = {g: np.dtype([("w", "f8", (g,)), ("k", "u1", (g,))]) for g in (1, 2, 3, 4)}
"""By granules: `w` the wide value where an element starts, `k` how many granules it has (0: plain
bits; REST: it started before; TAINT: tainted, and `w` is the number of the instruction)."""

Shadow = Array | None
Wide = tuple[Array, Array, Array]
SIZES = {"f16": 1, "bf16": 1, "f32": 2, "f64": 4, "f16x2": 1, "bf16x2": 1, "f32x2": 2}


def granules(size: int) -> int:
    """Granules of a register of a size in bytes."""
    return max(size // 2, 1)


def plain(g: int) -> Array:
    """The shadow of plain bits."""
    return np.zeros((1, 1), SHADOW[g])


def shadowd(shadow: Shadow) -> bool:
    """True if anything is more than plain bits."""
    return shadow is not None and bool(shadow["k"].any())


def halves(bits: Array) -> Array:
    """A register's bits as granules, lowest first, on a new last axis."""
    size = bits.dtype.itemsize
    if size == 1:
        return bits.astype(np.uint16)[..., None]
    whole = np.ascontiguousarray(bits)
    return whole.view(np.uint16).reshape(*whole.shape, size // 2)


def lane_value(bits: Array, kind: str, lane: int) -> Array:
    """The number that the bits of one lane of a float type stand for, in float64."""
    g = SIZES[kind]
    part = np.ascontiguousarray(halves(bits)[..., lane * g : (lane + 1) * g])
    if kind.startswith("bf16"):
        return bf16_to_f32(part[..., 0]).astype(np.float64)
    dtype = {1: np.float16, 2: np.float32, 4: np.float64}[g]
    return np.asarray(part.view(dtype)[..., 0].astype(np.float64))


def read(bits: Array, shadow: Shadow, kind: str, lane: int, site: int) -> Wide:
    """Wide value of one lane, whether it derives from data, and the taint (-1: none)."""
    exact = lane_value(bits, kind, lane)
    if shadow is None:
        return exact, np.zeros((1, 1), np.bool_), np.full((1, 1), -1.0)
    g = SIZES[kind]
    k = shadow["k"][..., lane * g : (lane + 1) * g]
    w = shadow["w"][..., lane * g : (lane + 1) * g]
    whole = k[..., 0] == g
    value = np.where(whole, w[..., 0], exact)
    known = whole | (k == 0).all(-1)
    if kind == "f32":
        # A bf16 number shifted into the upper half of a word is that number in fp32.
        upper = (k[..., 0] == 0) & (k[..., 1] == 1) & (halves(bits)[..., 0] == 0)
        upper &= np.abs(w[..., 1] - exact) <= 2.0**-7 * np.abs(exact)
        value, known = np.where(upper, w[..., 1], value), known | upper
    tainted = k == TAINT
    number = np.where(tainted.any(-1), np.max(np.where(tainted, w, -1.0), axis=-1), float(site))
    return value, (k != 0).any(-1), np.where(known, -1.0, number)


def joined(wides: Sequence[Wide], value: Array) -> Wide:
    """A result with the marks of its operands."""
    data, taint = wides[0][1], wides[0][2]
    for _, also, other in wides[1:]:
        data, taint = data | also, np.maximum(taint, other)
    return value, data, taint


def built(lanes: Sequence[Wide], g: int) -> Shadow:
    """The shadow of a register made of lanes of `g` granules; None for plain bits."""
    if not any(bool(data.any()) for _, data, _ in lanes):
        return None
    shape = np.broadcast_shapes(*(x.shape for lane in lanes for x in lane))
    result = np.zeros(shape, SHADOW[g * len(lanes)])
    for index, (value, data, taint) in enumerate(lanes):
        bad = data & (taint >= 0)
        start = index * g
        result["w"][..., start : start + g] = np.where(bad, taint, value)[..., None]
        result["k"][..., start : start + g] = np.where(bad, TAINT, np.where(data, REST, 0))[
            ..., None
        ]
        result["k"][..., start] = np.where(bad, TAINT, np.where(data, g, 0))
    return result


def arithmetic(
    function: Callable[..., Array], kind: str, site: int, bits: Sequence[Array], *shadows: Shadow
) -> Shadow:
    """The shadow of a float operation; `function` takes wide values, then narrow ones."""
    if not any(shadowd(shadow) for shadow in shadows):
        return None
    results = []
    for lane in range(2 if kind.endswith("x2") else 1):
        pairs = zip(bits, shadows, strict=True)
        wides = [read(b, shadow, kind, lane, site) for b, shadow in pairs]
        narrow = [lane_value(b, kind, lane) for b in bits]
        with np.errstate(all="ignore"):
            value = function([wide[0] for wide in wides], narrow)
        results.append(joined(wides, value))
    return built(results, SIZES[kind])


def converted(
    target: str, sources: Sequence[str], site: int, bits: Sequence[Array], *shadows: Shadow
) -> Shadow:
    """The shadow of a conversion between float formats: nothing is rounded; last operand lowest."""
    if not any(shadowd(shadow) for shadow in shadows):
        return None
    rows = list(zip(bits, shadows, sources, strict=True))[::-1]
    lanes = [read(b, shadow, kind, 0, site) for b, shadow, kind in rows]
    return built(lanes, SIZES[target])


def tainted(g: int, site: int, *shadows: Shadow) -> Shadow:
    """A result that is no real number of the data; plain where no operand is shadowd."""
    data, number = np.zeros((1, 1), np.bool_), np.full((1, 1), -1.0)
    for shadow in shadows:
        if shadow is not None:
            own = np.where(shadow["k"] == TAINT, shadow["w"], float(site)).max(-1)
            here = (shadow["k"] != 0).any(-1)
            data, number = data | here, np.maximum(number, np.where(here, own, -1.0))
    return built([(np.zeros((1, 1)), data, number)], g)


def merged(guard: Array | None, new: Shadow, old: Shadow, g: int) -> Shadow:
    """The new shadow where the guard holds, else the old one."""
    if guard is None:
        return new
    if new is None and old is None:
        return None
    chosen = np.where(guard, plain(g) if new is None else new, plain(g) if old is None else old)
    return np.asarray(chosen)


def sliced(shadow: Shadow, start: int, g: int) -> Shadow:
    """Some granules of a register."""
    if shadow is None:
        return None
    result = np.zeros(shadow.shape, SHADOW[g])
    for field in ("w", "k"):
        result[field] = shadow[field][..., start : start + g]
    return result


def packed(parts: Sequence[tuple[Shadow, int]], g: int) -> Shadow:
    """A register put together from shadows and their numbers of granules, lowest first."""
    known = [shadow for shadow, _ in parts if shadow is not None]
    if not known:
        return None
    result = np.zeros(np.broadcast_shapes(*(s.shape for s in known)), SHADOW[g])
    start = 0
    for shadow, size in parts:
        if shadow is not None:
            for field in ("w", "k"):
                result[field][..., start : start + size] = shadow[field][..., :size]
        start += size
    return result


def overlaid(g: int, site: int, bits: Sequence[Array], *shadows: Shadow) -> Shadow:
    """The shadow of a | b where each granule of one meets zero bits of the other; else a taint."""
    a, b = shadows
    if not (shadowd(a) or shadowd(b)):
        return None
    one, two = plain(g) if a is None else a, plain(g) if b is None else b
    clear_a = (halves(bits[0]) == 0) & (one["k"] == 0)
    clear_b = (halves(bits[1]) == 0) & (two["k"] == 0)
    fine = (clear_a | clear_b | ((one["k"] == 0) & (two["k"] == 0))).all(-1)
    result = np.zeros(np.broadcast_shapes(one.shape, two.shape), SHADOW[g])
    for field in ("w", "k"):
        result[field] = np.where(clear_a, two[field], one[field])
    spoiled = tainted(g, site, a, b)
    return result if spoiled is None else np.asarray(np.where(fine, result, spoiled))


def exchanged(lanes: Lanes, mode: str, shadow: Shadow, b: Array, c: Array, g: int) -> Shadow:
    """The shadow of a shuffle."""
    if shadow is None:
        return None
    own = np.arange(lanes.size, dtype=np.uint32).reshape(lanes.shape)
    source, _ = shuffle(mode, lanes, own, b, c)
    flat = np.broadcast_to(shadow, lanes.shape).reshape(-1)
    reached = source < lanes.size
    taken = flat[np.where(reached, source, 0)]
    return np.asarray(np.where(reached, taken, plain(g)))
