"""What the judge found in other projects, and what each finding means.

A finding explains broken laws. `parity peers` fails when a law is broken that no finding explains,
and when a finding explains nothing any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from twinstep.parity.proof.peers.observe import Observation


class Kind(Enum):
    """What a difference is."""

    CONTRACT = "another contract"
    ACCURACY = "less accurate"
    BUG = "a bug"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One explanation.

    Attributes:
        peers: whom it concerns.
        dtypes: on which dtype combinations; empty means all.
        laws: which laws it breaks; empty means any.
        kind: what it is.
        says: one sentence.
        evidence: the smallest input and what came out.
    """

    peers: tuple[str, ...]
    dtypes: tuple[str, ...] = ()
    laws: tuple[str, ...] = ()
    kind: Kind
    says: str
    evidence: str

    def explains(self, peer: str, dtype: str, law: str) -> bool:
        """Whether a broken law of a peer is this finding."""
        return (
            peer in self.peers
            and (not self.dtypes or dtype in self.dtypes)
            and (not self.laws or law in self.laws)
        )


FINDINGS = (
    Finding(
        peers=("torch_adamw_counter",),
        kind=Kind.CONTRACT,
        says="The step counter is an fp32 tensor and stands still at 2^24 = 16,777,216 steps.",
        evidence="A counter of 16,777,216 is 16,777,216 after the step.",
    ),
    Finding(
        peers=("torch_adamw_loop_pure", "torch_adamw_fused_pure"),
        kind=Kind.CONTRACT,
        says="Moments have the parameter's dtype, so each step rounds m and v to 16 bits.",
        evidence="bf16, v = 0, g = 3.7e-9, beta2 = 0: v is 1.36609e-17 instead of 1.36618e-17.",
    ),
    Finding(
        peers=("torch_sgd_fused",),
        kind=Kind.BUG,
        says=(
            "One step over a group in which some parameters have a momentum buffer and others do "
            "not raises TypeError; foreach and the plain loop take it."
        ),
        evidence=(
            "Two parameters, the second without a gradient in the first step; the second step: "
            "expected Tensor as element 1 in argument 2, but got NoneType."
        ),
    ),
    Finding(
        peers=("torch_update_scale",),
        laws=("power_of_two",),
        kind=Kind.CONTRACT,
        says="The scale is an fp32 tensor: one beyond 3.4e38 is infinite before it is used.",
        evidence="scale 2^128 as float64, overflow, backoff 0.25: inf instead of 2^126.",
    ),
    Finding(
        peers=("torch_total_norm", "torch_total_norm_foreach"),
        dtypes=("fp16", "bf16"),
        kind=Kind.ACCURACY,
        says="The norm of each tensor and the total are rounded to the gradient's dtype.",
        evidence="fp16, gradient (1, 1): 1.4140625 instead of 1.4142135, 171 times the bound.",
    ),
    Finding(
        peers=("torch_total_norm", "torch_total_norm_foreach"),
        kind=Kind.ACCURACY,
        says=(
            "The sum of squares overflows fp32, so that a finite gradient beyond 1.8e19 has an "
            "infinite norm, and overflow read off the norm skips a step that has none."
        ),
        evidence="fp32, two elements whose norm is 8.5e37: inf.",
    ),
    Finding(
        peers=("torch_clip", "deepspeed_clip_by_norm"),
        kind=Kind.CONTRACT,
        says="max_norm = 0 multiplies every gradient by zero instead of switching clipping off.",
        evidence="norm 0, max_norm 0: coefficient 0 instead of 1.",
    ),
    Finding(
        peers=("deepspeed_cpu_adamw", "deepspeed_cpu_adam", "deepspeed_cpu_adamw_pure"),
        kind=Kind.ACCURACY,
        says="1 - beta is formed in fp32, so the new gradient's weight is off by up to 3e-5.",
        evidence=(
            "beta1 = 0.9991, m = 0, g = 1: m is 0.00089996930 instead of 0.00089999876, "
            "55 times the bound."
        ),
    ),
    Finding(
        peers=("deepspeed_cpu_adamw", "deepspeed_cpu_adam", "deepspeed_cpu_adamw_pure"),
        kind=Kind.ACCURACY,
        says="The bias corrections are formed in fp32: 1 - beta^t cancels in the first steps.",
        evidence=(
            "beta2 = 0.9987, step 5, m = g = v = 1: p is -0.080517195 instead of -0.080517830, "
            "85 ULP, 4.1 times the bound."
        ),
    ),
    Finding(
        peers=("deepspeed_norm_of_tensors", "deepspeed_flattened_norm"),
        kind=Kind.CONTRACT,
        says="A norm that is inf or NaN is reported as -1.",
        evidence="fp32, one element inf: -1.",
    ),
    Finding(
        peers=("deepspeed_norm_of_tensors",),
        laws=("boundary_sizes",),
        kind=Kind.BUG,
        says="An empty list of gradients raises RuntimeError instead of having the norm 0.",
        evidence="get_global_norm_of_tensors([]): stack expects a non-empty TensorList.",
    ),
)


def unexplained(seen: Sequence[Observation]) -> list[str]:
    """Broken laws without a finding, one sentence each."""
    return [
        f"{one.peer} [{one.dtype}] breaks `{law}` and no finding explains it: {text}"
        for one in seen
        for law, text in one.broken.items()
        if not any(finding.explains(one.peer, one.dtype, law) for finding in FINDINGS)
    ]


def idle(seen: Sequence[Observation]) -> list[str]:
    """Findings about peers that were judged and break nothing that they explain."""
    judged = {one.peer for one in seen}
    return [
        f"{name} no longer shows: {finding.says}"
        for finding in FINDINGS
        for name in finding.peers
        if name in judged
        and not any(
            finding.explains(one.peer, one.dtype, law)
            for one in seen
            if one.peer == name
            for law in one.broken
        )
    ]
