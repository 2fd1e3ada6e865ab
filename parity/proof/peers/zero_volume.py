"""Bytes and calls of one step of ZeRO on two ranks: theory's, ours and DeepSpeed's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn import Parameter

from twinstep.contract.compat import Compat
from twinstep.parity.proof.peers.wire import Wire
from twinstep.parity.proof.peers.zero_config import ZeroConfig, drawn
from twinstep.parity.proof.peers.zero_run import DTYPES, Make, loss_of, ours, theirs

SHAPES = ((16, 32), (32,), (32, 15))  # 1,024 elements: no padding on two ranks
ELEMENTS = 1024
BUCKET = 600


@dataclass(frozen=True, kw_only=True)
class Volume:
    """One step.

    Attributes:
        stage: 1 or 2.
        micro_batches: of the step.
        who: takes it.
        per_element: bytes that the average rank sends for each bf16 parameter.
        calls: that carry them.
        rest: bytes beside them, for norm, overflow and scale.
        rest_calls: that carry these.
    """

    stage: int
    micro_batches: int
    who: str
    per_element: float
    calls: int
    rest: float
    rest_calls: int


def theory(stage: int, micro_batches: int) -> float:
    """Bytes for each bf16 parameter on two ranks: (2 k + 2) / 2 in stage 2, 4 / 2 in stage 1."""
    reductions = micro_batches if stage == 2 else 1
    return (2 * reductions + 2) / 2


def volume_faults(volumes: Sequence[Volume]) -> list[str]:
    """Steps of ours that do not send as many bytes as theory has; and if none was counted."""
    own = [row for row in volumes if row.who == "ours"]
    wanted = [theory(row.stage, row.micro_batches) for row in own]
    return [
        f"ZeRO-{row.stage}, {row.micro_batches} micro-batches: {row.per_element} bytes for each "
        f"parameter, but should be {right}"
        for row, right in zip(own, wanted, strict=True)
        if row.per_element != right
    ] or ([] if own else ["ZeRO: no bytes were counted"])


def measured(wire: Wire) -> Iterator[Volume]:
    """Steps of both, counted."""
    for stage in (1, 2):
        for micro_batches in (1, 4):
            config = replace(
                drawn(1, 2),
                stage=stage,
                micro_batches=micro_batches,
                world=2,
                dtype="bf16",
                sums="bf16",
                wire="bf16",
                shapes=(SHAPES,),
                rates=(0.1,),
                decays=(0.0,),
                clip_grad=1.0,
                checks=True,
                bucket=BUCKET,
                gathered=100_000,
                contiguous=True,
                scatters=True,
                postscales=True,
                predivides=1.0,
                idle=-1,
                events="gg",
            )
            sides: dict[str, Make] = {
                "ours": partial(ours, side="fast", compat=Compat()),
                "DeepSpeed": theirs,
                "DeepSpeed, to one rank": theirs,
            }
            for who, make in sides.items():
                chosen = replace(config, multi_rank=who != "DeepSpeed, to one rank")
                yield _volume(who, chosen, make, wire)


def _volume(who: str, config: ZeroConfig, make: Make, wire: Wire) -> Volume:
    params = [Parameter(torch.ones(shape, dtype=DTYPES["bf16"])) for shape in SHAPES]
    side = make(config, [params])
    for step in range(2):
        # The first step makes what is kept.
        wire.calls.clear()
        for micro in range(config.micro_batches):
            side.micro_batch(lambda: loss_of(config, params, step, micro))  # noqa: B023 - called at once
        side.step()
    calls = list(wire.calls)
    side.optimizer.destroy()
    large = [size for dtype, size in calls if dtype == DTYPES["bf16"]]
    rest = [size for dtype, size in calls if dtype != DTYPES["bf16"]]
    return Volume(
        stage=config.stage,
        micro_batches=config.micro_batches,
        who=who,
        per_element=sum(large) / ELEMENTS,
        calls=len(large),
        rest=sum(rest),
        rest_calls=len(rest),
    )
