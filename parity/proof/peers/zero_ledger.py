"""Differences between DeepSpeed's ZeRO and ours under `Compat.deepspeed()`, and where they show.

A row applies to configurations. In all others every bit agrees, but for what a norm decides; and so
it does in those where a row applies, once the option that brings the difference is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from twinstep.parity.proof.peers.zero_config import ZeroConfig


@dataclass(frozen=True, kw_only=True)
class ZeroDifference:
    """One row.

    Attributes:
        name: of it, in the record.
        edges: ids in the edge table.
        theirs: what DeepSpeed does.
        side: whose doing it is, "their bug" or "our choice".
        reason: why we do otherwise.
        applies: true of configurations where it may show.
        without: options with which it cannot show.
    """

    name: str
    edges: str
    theirs: str
    side: str
    reason: str
    applies: Callable[[ZeroConfig], bool]
    without: Mapping[str, object]


def _divides_early(config: ZeroConfig) -> bool:
    """The mean divides before it sums, and by the number of ranks alone."""
    return config.scatters or not config.postscales


LEDGER = (
    ZeroDifference(
        name="divided before the sum",
        edges="-",
        theirs="Outside of contiguous buckets the mean divides by the number of ranks before it "
        "sums, whatever the predivide factor and `prescale_gradients`.",
        side="their bug",
        reason="Where gradients lie decides nothing.",
        applies=lambda c: (
            c.world > 1 and not c.contiguous and not _divides_early(c) and c.predivides == 3.0
        ),
        without={"contiguous": True},
    ),
    ZeroDifference(
        name="divided in fp16",
        edges="Z-14",
        theirs="In stage 2 the mean divides fp16 gradients first, and makes them the fp32 that is "
        "sent afterwards.",
        side="our choice",
        reason="Who asks for fp32 on the wire wants the last bit of subnormal gradients.",
        applies=lambda c: (
            (c.world > 1 and c.contiguous and _divides_early(c))
            and (c.stage, c.dtype, c.wire) == (2, "fp16", "fp32")
        ),
        without={"wire": "fp16"},
    ),
    ZeroDifference(
        name="rounded before the sum",
        edges="-",
        theirs="In stage 2 without sums in fp32, gradients that were sent in fp32 are rounded to "
        "the dtype of the model before they are added up over micro-batches.",
        side="our choice",
        reason="A sum is rounded once.",
        applies=lambda c: (
            (c.world > 1 and c.micro_batches > 1 and c.sums == c.dtype)
            and (c.stage, c.wire) == (2, "fp32")
        ),
        without={"micro_batches": 1},
    ),
)


def without_differences(config: ZeroConfig) -> ZeroConfig | None:
    """The configuration with other options where rows apply; None where none does."""
    rows = [row for row in LEDGER if row.applies(config)]
    options: dict[str, Any] = {key: value for row in rows for key, value in row.without.items()}
    return replace(config, **options) if rows else None
