"""Every known difference between DeepSpeed's optimizers and our default, and where it was seen.

A row is one field of `Compat`, or something that no field brings back. Its evidence is a count of
live configurations, a scene, or both; a test fails where there is neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from twinstep.parity.proof.peers.edge_scene import Shown


class Side(Enum):
    """Whose doing a difference is."""

    THEIRS = "their bug"
    OURS = "our choice"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One row.

    Attributes:
        field: of `Compat`, which brings it back; empty where none does.
        edges: ids in the edge table.
        theirs: what DeepSpeed does.
        side: whose doing it is.
        reason: why we do otherwise.
        scene: where it is shown; empty where the live runs alone show it.
        measured: which number of the live runs shows it, where no field does.
    """

    field: str = ""
    edges: str
    theirs: str
    side: Side
    reason: str
    scene: str = ""
    measured: str = ""


BUG, CHOICE = Side.THEIRS, Side.OURS
DIFFERENCES = (
    Difference(
        field="unscale_with_updated_scale",
        edges="LS-1, FP-9",
        theirs="The scale is updated before the gradients are divided by it.",
        side=BUG,
        reason="A step on which the scale grows applies and reports half the gradient.",
        scene="LS-1",
    ),
    Difference(
        field="step_at_construction",
        edges="FP-1, UF-5",
        theirs="Construction takes a step with zero gradients.",
        side=BUG,
        reason="Masters decay and counters advance before training; model weights do not.",
        scene="FP-1",
    ),
    Difference(
        field="external_scale_stays",
        edges="LS-2, FP-12",
        theirs="`override_loss_scale(s)` multiplies the loss by s and divides by its own scale.",
        side=BUG,
        reason="The gradient is off by their quotient.",
    ),
    Difference(
        field="report_scaled_norm",
        edges="UF-1",
        theirs="The unfused optimizer reports the norm of scaled gradients.",
        side=BUG,
        reason="The flat one divides it; a logged norm should not jump with the scale.",
    ),
    Difference(
        field="clip_without_experts",
        edges="ME-3",
        theirs="The unfused optimizer leaves experts out of the norm, and clips them with it.",
        side=BUG,
        reason="A clipped gradient can be longer than the limit.",
    ),
    Difference(
        field="keep_masters_on_load",
        edges="BF-5",
        theirs="`BF16_Optimizer` keeps its masters when it loads without fp32 weights.",
        side=BUG,
        reason="The next step overwrites the model weights that were loaded.",
    ),
    Difference(
        field="shared_step_counter",
        edges="FA-1, FA-2",
        theirs="`FusedAdam` advances the counter of the last parameter, for the whole group.",
        side=BUG,
        reason="Bias corrections start again whenever another parameter is the last.",
        scene="FA-1",
    ),
    Difference(
        field="moments_in_param_dtype",
        edges="FA-6",
        theirs="`FusedAdam` keeps moments in the dtype of the parameter.",
        side=CHOICE,
        reason="In fp16 small squares are 0 and updates explode; fp32 moments cost 4 bytes more.",
        scene="FA-6",
    ),
    Difference(
        edges="NM-12",
        theirs="A norm is a sum of squares in fp32.",
        side=CHOICE,
        reason="Ours is exact and rounded once, so that order and splitting cannot matter.",
        measured="worst_norm",
    ),
    Difference(
        edges="EN-1, FP-10",
        theirs="The engine without ZeRO divides by a scale that it never multiplied the loss by.",
        side=BUG,
        reason="There is no engine here; `backward` multiplies by what `step` divides by.",
        scene="EN-1",
    ),
    Difference(
        edges="BF-9, EN-2",
        theirs="`BF16_Optimizer.backward(loss)` raises TypeError; the runs call what engines call.",
        side=BUG,
        reason="A method that is there should work.",
        scene="BF-9",
    ),
    Difference(
        edges="-",
        theirs="The FP16 wrappers load masters and leave the model weights to the caller.",
        side=CHOICE,
        reason="Ours publishes the masters, so that both agree from the start.",
        scene="LOAD",
    ),
)


def evidence(
    row: Difference,
    visible: Mapping[str, Mapping[str, int]],
    measured: Mapping[str, float],
    scenes: Sequence[Shown],
) -> str:
    """Where a difference was seen; empty if nowhere."""
    found = []
    counts = visible.get(row.field, {})
    if counts:
        listed = ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))
        found.append(f"configurations: {listed}")
    if row.measured and measured[row.measured] > 0:
        found.append(f"up to {measured[row.measured]:.2f} of what fp32 may lose")
    if any(one.edge == row.scene and one.upstream not in ([], one.default) for one in scenes):
        found.append(f"scene {row.scene}")
    return "; ".join(found)
