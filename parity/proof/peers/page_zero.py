"""The part of docs/reference/peers.md on ZeRO: configurations, differences, bytes."""

from __future__ import annotations

from twinstep.parity.proof.peers.record import recorded_zero
from twinstep.parity.proof.peers.zero_ledger import LEDGER
from twinstep.parity.proof.peers.zero_live import ZeroAgreement
from twinstep.parity.proof.peers.zero_volume import ELEMENTS, Volume, theory

ZERO = """
## ZeRO, live

DeepSpeed's engine with ZeRO 1 and 2 ran beside `ZeroOptimizer` of both sides, the fast one on
replay, in one and two processes over gloo: {configurations} random configurations ({kinds});
{steps} steps, {skipped} of them skipped; buckets, contiguous gradients, overlap, round robin,
`reduce_scatter`, predivide factors, accumulation over micro-batches, dtypes of sums and of the
wire, clipping, static and dynamic scales, several groups, gradients that are missing, zero,
infinite on one rank, or subnormal: `parity peers --zero`. The inner optimizer is torch's.

- With `Compat.deepspeed()` scale, skipped steps, masters of each rank and all weights agree bit
  for bit in {exact} configurations, on both sides. {within} clip, and agree within what a norm in
  fp32 allows. Largest distance over its bound: norms {norm:.2f}, weights {weight:.2f}.
- In {explained} the differences below show, whatever `Compat` is. The same configurations agree
  without the options that bring them.
- Our default differs in {default}, where a scale that moves is divided out
  (`unscale_with_updated_scale`, Z-8).

| what theirs does | edges | whose doing | why ours does not | may show in | seen in |
| --- | --- | --- | --- | --- | --- |
"""
WIRE = """
Bytes and calls of one step on two ranks, for {elements:,} bf16 parameters in three tensors, buckets
of at most 600 elements; what the average rank sends, by the algorithm that sends least, counted at
the functions of torch.distributed. Theory is (2 k + 2) (W - 1) / W bytes for each parameter in
stage 2 and 4 (W - 1) / W in stage 1, with k micro-batches over W ranks. Beside them go norm,
overflow and scale: one message here, one for overflow and one for each group's norm there.

| stage | k | theory | | bytes per parameter | calls | bytes beside | calls beside |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
WHY = """
DeepSpeed all-reduces a bucket that several ranks own, which sends its gradients twice.
`use_multi_rank_bucket_allreduce: false` reduces each part to its owner, as ours always does.
"""


def zero_lines() -> list[str]:
    """The section, from the record."""
    seen = recorded_zero()
    total = sum(seen.kinds.values())
    text = ZERO.format(
        configurations=total,
        kinds="; ".join(f"{count} {kind}" for kind, count in sorted(seen.kinds.items())),
        steps=seen.steps,
        skipped=seen.skipped,
        exact=seen.exact,
        within=seen.within,
        norm=seen.worst_norm,
        weight=seen.worst_weight,
        explained=total - seen.exact - seen.within,
        default=seen.default_differs,
    )
    rows = [
        f"| {row.theirs} | {row.edges} | {row.side} | {row.reason} | {seen.applies[row.name]} "
        f"| {seen.shows[row.name]} |"
        for row in LEDGER
    ]
    return [text + "\n".join(rows), *_wire(seen)]


def _wire(seen: ZeroAgreement) -> list[str]:
    rows = [_volume(row) for row in seen.volumes]
    return [WIRE.format(elements=ELEMENTS) + "\n".join(rows), WHY]


def _volume(row: Volume) -> str:
    wanted = theory(row.stage, row.micro_batches)
    return (
        f"| {row.stage} | {row.micro_batches} | {wanted:g} | {row.who} | {row.per_element:g} "
        f"| {row.calls} | {row.rest:g} | {row.rest_calls} |"
    )
