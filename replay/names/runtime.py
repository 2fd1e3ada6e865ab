"""Names of memory, as the code of a named kernel loads and stores them."""

from __future__ import annotations

import numpy as np

from twinstep.replay.dtypes import Array
from twinstep.replay.machine.access import SHARED_WINDOW
from twinstep.replay.machine.lanes import Lanes
from twinstep.replay.machine.matrices import places_of_items
from twinstep.replay.machine.named import NamedBytes
from twinstep.replay.names.memory import NamedMemory
from twinstep.replay.names.session import NotNamed, session
from twinstep.replay.names.sums import mix
from twinstep.replay.names.table import PLAIN
from twinstep.replay.names.values import Names, halves, named, packed, wrapped


def matrix_items(
    lanes: Lanes, address: Array, count: int, transposed: bool, offset: int
) -> list[tuple[Array, Array]]:
    """Addresses of every thread's two items, for each matrix of `ldmatrix`."""
    return places_of_items(lanes, address, count, transposed, offset)


def memory(lanes: Lanes, space: str) -> NamedMemory:
    """Names of global memory, or of a batch's shared or local memory."""
    if space in ("shared", "local"):
        own: dict[str, NamedMemory] = vars(lanes.batch).setdefault("names", {})
        return own.setdefault(space, NamedMemory())
    return session().memory


def access(
    lanes: Lanes, space: str, address: Array, offset: int, guard: Array | None, site: str
) -> tuple[Array, Array]:
    """Flat positions of the threads that access memory, and the byte where each word starts."""
    whole = np.broadcast_to(address.astype(np.int64) + offset, lanes.shape).reshape(-1)
    flat = np.arange(lanes.size)
    if guard is not None:
        flat = np.flatnonzero(np.broadcast_to(guard, lanes.shape))
    start = whole[flat]
    if space in ("shared", "local"):
        owner = np.broadcast_to(lanes.row_index, lanes.shape).reshape(-1)[flat]
        if space == "local":
            threads = np.broadcast_to(lanes.thread_index, lanes.shape).reshape(-1)[flat]
            owner = owner * lanes.batch.threads + threads
        start = start + (owner.astype(np.int64) << 32)
    elif not space and len(start) and int(start.max()) >= SHARED_WINDOW:
        raise NotNamed(f"shared memory by a generic address: {site}", "names", site)
    return flat, start


def unknown(lanes: Lanes, flat: Array, old: Names, g: int) -> Names:
    """Names of what exchanges found: a leaf for each thread, for it depends on their order."""
    codes = np.broadcast_to(np.int64(PLAIN) if old is None else old["n"], (*lanes.shape, g)).copy()
    table = session().table
    found = [table.leaf(f"what an exchange found ({n})", g) for n in range(len(flat))]
    codes.reshape(-1, g)[flat] = table.codes(np.array(found, np.int64), g)
    return wrapped(codes)


def clear(where: NamedMemory, start: Array, word: int, site: str, swaps: bool) -> None:
    """Let an atomic put plain bits into memory; refuse it where that has names, but for a swap.

    Raises:
        NotNamed: naming the instruction.
    """
    places = ((start // 2)[:, None] + np.arange(max(word // 2, 1))).reshape(-1)
    if not swaps and (where.held(places) >= 0).any():
        raise NotNamed(f"an atomic on memory with names: {site}", "names", site)
    where.forget(places)


def added(
    where: NamedMemory, lanes: Lanes, flat: Array, start: Array, word: int, site: str, *names: Names
) -> None:
    """Let atomics of a sum put the mix of their operands, and of what was there, into memory.

    A block's threads share one mix, whether they add or not: which do depends on the data.
    """
    if not any(named(n) for n in names):
        clear(where, start, word, site, swaps=False)
        return
    table, g = session().table, max(word // 2, 1)
    blocks = flat // lanes.shape[1]
    of_block = [set[int]() for _ in range(lanes.shape[0])]
    for own in (n for n in names if n is not None):
        codes = np.broadcast_to(own["n"], (*lanes.shape, own["n"].shape[-1]))
        for block, inside in enumerate(of_block):
            inside.update((np.unique(codes[block]) >> 2).tolist())
    for place in np.unique(start).tolist():
        places = place // 2 + np.arange(g)
        inside = set((where.held(places) >> 2).tolist())
        for block in np.unique(blocks[start == place]).tolist():
            inside |= of_block[block]
        inside.discard(-1)
        if inside:
            found = np.array([mix(table, inside, g)], np.int64)
            where.sum(places, table.codes(found, g).reshape(-1))


def load(
    where: NamedMemory,
    lanes: Lanes,
    flat: Array,
    start: Array,
    word: int,
    bits: Array,
    site: str,
) -> Names:
    """Names of one loaded word; `bits` is what was loaded, in the shape of the lanes."""
    if word == 1:
        if (where.held(start // 2) >= 0).any():
            raise NotNamed(f"half a granule is read: {site}", "names", site)
        return None
    g = word // 2
    own = halves(np.broadcast_to(bits, lanes.shape)).reshape(lanes.size, -1)[flat][:, :g]
    places = ((start // 2)[:, None] + np.arange(g)).reshape(-1)
    # Tables of addresses are the host's own.
    checked = site if word != 8 else ""
    codes = where.load(places, np.ascontiguousarray(own).reshape(-1), checked)
    session().memory.foreign = session().memory.foreign or where.foreign
    if not (codes >= 0).any():
        return None
    result = np.full((lanes.size, g), PLAIN, np.int64)
    result[flat] = codes.reshape(-1, g)
    return wrapped(result.reshape(*lanes.shape, g))


def parameter(lanes: Lanes, start: int, word: int, g: int, signed: bool, site: str) -> Names:
    """Names of a word of the parameters, in a register of `g` granules.

    Raises:
        NotNamed: a byte of one with a name is read, or its sign is extended.
    """
    found = np.full((1, 1, g), PLAIN, np.int64)
    for begin, own in lanes.batch.named.items():
        if begin < start + word and start < begin + len(own):
            if word < 2 or (signed and word < 2 * g):
                raise NotNamed(f"names are not followed through {site}", "names", site)
            codes = _rounded(own)
            for at in range(word // 2):
                inside = start // 2 + at - begin // 2
                if 0 <= inside < len(codes):
                    found[..., at] = codes[inside]
    return wrapped(found) if (found >= 0).any() else None


def _rounded(own: NamedBytes) -> Array:
    """The granules of a parameter that a float64 was rounded to."""
    table = session().table
    if own.kind == "f64":
        return np.asarray(table.codes(np.array(own.number), 4))
    kind = "f32" if own.kind == "bf16" else own.kind
    g = 1 if kind == "f16" else 2
    number = table.row(f"cvt.rn.{kind}.f64", (own.number,), g)
    codes = np.asarray(table.codes(np.array(number), g))
    # Triton's launcher cuts the low half off.
    return codes[1:] if own.kind == "bf16" else codes


def unnamed_parameters(lanes: Lanes, site: str) -> None:
    """Refuse parameters with names where their address is computed.

    Raises:
        NotNamed: some have names.
    """
    if lanes.batch.named:
        raise NotNamed(f"names are not followed through {site}", "names", site)


def matrix(
    where: NamedMemory, lanes: Lanes, items: tuple[Array, Array], bits: Array, site: str
) -> Names:
    """Names of a register of `ldmatrix`, of two items that lie apart."""
    parts = []
    for index, address in enumerate(items):
        flat, start = access(lanes, "shared", address, 0, None, site)
        own = (bits >> np.uint32(16 * index)).astype(np.uint16)
        parts.append((load(where, lanes, flat, start, 2, own, site), 1))
    return packed(parts, 2)


def store(
    where: NamedMemory,
    lanes: Lanes,
    flat: Array,
    start: Array,
    word: int,
    bits: Array,
    names: Names,
    site: str,
) -> None:
    """Store one word of each thread; where two write one place, the higher thread's stays."""
    if word == 1:
        if named(names) or (where.held(start // 2) >= 0).any():
            raise NotNamed(f"half a granule is written: {site}", "names", site)
        return
    g = word // 2
    own = halves(np.broadcast_to(bits, lanes.shape)).reshape(lanes.size, -1)[flat][:, :g]
    places = ((start // 2)[:, None] + np.arange(g)).reshape(-1)
    codes = np.full((len(flat), g), PLAIN, np.int64)
    if names is not None:
        codes = np.broadcast_to(names["n"], (*lanes.shape, names["n"].shape[-1]))
        codes = codes.reshape(lanes.size, -1)[flat][:, :g]
    where.store(places, codes.reshape(-1), np.ascontiguousarray(own).reshape(-1))
