"""Kernels that are right when they are called, and wrong when a GPU replays them as a graph.

Only a GPU shows it. Without one `parity mutate` reports that they cannot run here; `make gpu-check`
judges them where there is one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twinstep.parity.proof.corpus.calls import CastCopyCall
from twinstep.parity.proof.corpus.entry import Entry
from twinstep.parity.proof.corpus.shelf import wrong

SHELF: list[Entry] = []
MARK = "cast"
captured = wrong(
    SHELF,
    "cast_copy",
    component="capture",
    law="graph_capture",
    arithmetic="exact",
    engines=("cuda",),
    claims=("capturable",),
    alone=True,
)


@captured
def waits_for_the_device(call: CastCopyCall) -> None:
    """The launcher waits until the copies are there, which no capture allows."""
    for source, copy in zip(call.sources, call.copies, strict=True):
        copy.copy_(source)
    if any(source.is_cuda for source in call.sources):
        torch.cuda.synchronize()


@captured
def casts_cached_under_capture(call: CastCopyCall) -> None:
    """While a graph is captured, a cast that the call before has made is taken from a cache."""
    for source, copy in zip(call.sources, call.copies, strict=True):
        # A storage keeps what is noted on it for as long as it lives.
        known: dict[int, Tensor] = source.untyped_storage().__dict__.setdefault(MARK, {})
        place = source.data_ptr()
        if place not in known or not _capturing(source):
            known[place] = source.to(copy.dtype)
        copy.copy_(known[place])


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
