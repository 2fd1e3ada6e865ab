"""Bytes are counted as the hardware moves them: equal addresses within a warp once."""

from __future__ import annotations

import numpy as np
import pytest

from twinstep.replay.machine.lanes import distinct


@pytest.mark.parametrize("spread", [1, 3, 40, 10_000])
@pytest.mark.parametrize("ordered", [False, True])
def test_pairs_of_warp_and_address_are_counted_once(spread: int, ordered: bool) -> None:
    rng = np.random.default_rng(spread)
    warp = np.repeat(np.arange(9), 32)[rng.random(288) < 0.8]
    address = rng.integers(1 << 40, (1 << 40) + spread, len(warp)).astype(np.uint64)
    if ordered:
        address = np.concatenate([np.sort(address[warp == w]) for w in range(9)])
    assert distinct(address, warp) == len(set(zip(warp.tolist(), address.tolist(), strict=True)))


def test_one_access_is_one_pair() -> None:
    assert distinct(np.array([5], np.uint64), np.array([0])) == 1
