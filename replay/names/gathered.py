"""Names inside a sum, and of what leaves it, as the code of a named kernel computes with them."""

from __future__ import annotations

import numpy as np

from twinstep.replay.dtypes import Array
from twinstep.replay.names.session import session
from twinstep.replay.names.sums import mix
from twinstep.replay.names.values import Names, merged, named, packed, put, sliced


def gathered(g: int, *names: Names) -> Names:
    """Names inside a sum: the mix of what a result was made of."""
    codes = [n["n"] for n in names if n is not None]
    if not any((n >= 0).any() for n in codes):
        return None
    shape = np.broadcast_shapes(*(n.shape[:-1] for n in codes))
    columns = [np.broadcast_to(n, (*shape, n.shape[-1])) for n in codes]
    rows = np.concatenate(columns, axis=-1).reshape(-1, sum(n.shape[-1] for n in codes))
    mixes = session().sums.mixes(session().table, g)
    found = [mixes[row] for row in map(tuple, (rows >> 2).tolist())]
    return put(np.array(found, np.int64).reshape(shape), g)


def gathered_apart(g: int, *names: Names) -> Names:
    """Names of a bitwise operation inside a sum: every granule has the mix of its own operands.

    A compiler packs two small numbers, each of another sum, into one register.
    """
    numbers = [n["n"] >> 2 for n in names if n is not None]
    if all((n == n[..., :1]).all() for n in numbers):
        return gathered(g, *names)
    return packed([(gathered(1, *(sliced(n, at, 1) for n in names)), 1) for at in range(g)], g)


def gathered_choice(g: int, condition: Array, chooser: Names, a: Names, b: Names) -> Names:
    """Names of a selection inside a sum: of what a predicate without a name selects."""
    return gathered(g, chooser, a, b) if named(chooser) else merged(condition, a, b, g)


def gathered_by_all(g: int, *names: Names) -> Names:
    """Names of what threads tell one another inside a sum: the mix of all that they have."""
    known = {int(code) >> 2 for n in names if n is not None for code in np.unique(n["n"])} - {-1}
    found = mix(session().table, known, g) if known else -1
    return put(np.full((1, 1), found), g)


def left(bits: Array, names: Names, g: int) -> Names:
    """Names of what leaves a sum."""
    if not named(names):
        return names
    assert names is not None
    numbers, own = np.broadcast_arrays(names["n"][..., 0] >> 2, bits)
    pairs = np.stack(
        [numbers.reshape(-1), own.reshape(-1).astype(np.uint64).view(np.int64)], axis=1
    )
    unique, inverse = np.unique(pairs, axis=0, return_inverse=True)
    state = session()
    found = [
        n if n < 0 else state.sums.left(state.table, n, b % (1 << 64), g)
        for n, b in unique.tolist()
    ]
    return put(np.array(found, np.int64)[inverse.reshape(-1)].reshape(numbers.shape), g)
