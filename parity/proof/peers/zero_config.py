"""Random configurations of ZeRO on real ranks, the same for DeepSpeed's engine and for us."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """One run.

    Attributes:
        seed: of the weights and the gradients.
        world: number of ranks.
        stage: 1 or 2.
        dtype: of the model.
        sums: dtype of sums over micro-batches.
        wire: dtype in which gradients are sent.
        shapes: of the parameters, by group.
        rates: learning rate of each group.
        decays: weight decay of each group.
        clip_grad: largest norm; 0 does not clip.
        static_scale: the loss scale of fp16; 0 means a dynamic one.
        power: first dynamic scale, as a power of two.
        scale_window: clean steps until it grows.
        hysteresis: overflows until it shrinks.
        refills: every clean step refills the hysteresis.
        checks: of bf16: an overflow skips the step.
        micro_batches: backward passes for each step.
        bucket: largest number of elements reduced together.
        gathered: largest number of elements gathered together.
        contiguous: gradients of a bucket are copied into one buffer.
        overlaps: buckets are sent while others are filled.
        dealt: parameters lie in round-robin order.
        scatters: `reduce_scatter`.
        postscales: without `scatters`: divide after the sum.
        predivides: without `scatters`: the part of the divisor that is taken before.
        multi_rank: DeepSpeed's `use_multi_rank_bucket_allreduce`.
        idle: parameter that has no gradient in every third step; -1 for none.
        events: for each step `g` (gradients), `o` (infinite on one rank), `z` (zero) or `t`
            (so small that they are no normal numbers of fp16).
    """

    seed: int
    world: int
    stage: int
    dtype: str
    sums: str
    wire: str
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    rates: tuple[float, ...]
    decays: tuple[float, ...]
    clip_grad: float
    static_scale: float
    power: int
    scale_window: int
    hysteresis: int
    refills: bool
    checks: bool
    micro_batches: int
    bucket: int
    gathered: int
    contiguous: bool
    overlaps: bool
    dealt: bool
    scatters: bool
    postscales: bool
    predivides: float
    multi_rank: bool
    idle: int
    events: str

    @property
    def kind(self) -> str:
        """Words for messages."""
        ranks = "1 rank" if self.world == 1 else f"{self.world} ranks"
        return f"ZeRO-{self.stage}, {self.dtype}, {ranks}"

    @property
    def clips(self) -> bool:
        """True if a norm decides about the weights."""
        return self.clip_grad > 0

    @property
    def dynamic(self) -> bool:
        """True if the loss scale moves."""
        return self.dtype == "fp16" and self.static_scale == 0

    @property
    def tensors(self) -> int:
        """Number of parameters and groups."""
        return sum(len(group) + 1 for group in self.shapes)


def drawn(seed: int, steps: int) -> ZeroConfig:
    """The configuration of a seed; two of three have two ranks."""
    dice = random.Random(seed)
    world = 1 if seed % 3 == 0 else 2
    stage = dice.choice((1, 2))
    dtype = dice.choice(("fp16", "bf16"))
    # An engine that sums gradients of bf16 in fp32 takes another optimizer in stage 1.
    sums = dice.choice(("fp32", dtype)) if (dtype, stage) != ("bf16", 1) else dtype
    scatters = dice.random() < 0.55
    groups = dice.choice((1, 1, 2, 3))
    shapes = tuple(tuple(_shape(dice) for _ in range(dice.randint(1, 4))) for _ in range(groups))
    clips = dice.random() < 0.35
    checks = dtype == "fp16" or dice.random() < 0.8
    # No normal numbers of fp16 are left of them where the loss is not scaled.
    wire = dice.choice((dtype, "fp32"))
    tiny = dice.random() < (0.7 if (dtype, wire) == ("fp16", "fp32") else 0.1)
    return ZeroConfig(
        seed=seed,
        world=world,
        stage=stage,
        dtype=dtype,
        sums=sums,
        wire=wire,
        shapes=shapes,
        rates=tuple(dice.choice((1e-2, 3e-3, 0.1)) for _ in range(groups)),
        # Clipped runs are compared within a bound that plain gradient descent allows to state.
        decays=tuple(0.0 if clips else dice.choice((0.0, 0.01, 0.3)) for _ in range(groups)),
        clip_grad=dice.choice((0.05, 0.5, 3.0)) if clips else 0.0,
        static_scale=1.0 if tiny else dice.choice((0.0, 0.0, 0.0, 128.0, 1000.0)),
        power=dice.randint(9, 12),
        scale_window=dice.choice((1, 2, 1000)),
        hysteresis=dice.choice((1, 2, 3)),
        refills=dice.random() < 0.5,
        checks=checks,
        micro_batches=dice.choice((1, 1, 2, 3)),
        bucket=dice.choice((1, 7, 40, 100, 100_000)),
        gathered=dice.choice((2, 16, 100_000)),
        contiguous=dice.random() < 0.55,
        overlaps=dice.random() < 0.5,
        dealt=dice.random() < 0.4,
        scatters=scatters,
        postscales=scatters or dice.random() < 0.7,
        predivides=1.0 if scatters else dice.choice((1.0, 2.0, 3.0)),
        multi_rank=dice.random() < 0.6,
        idle=dice.choice((-1, -1, 0)),
        # An infinity that is stepped with makes NaNs, which are equal to nothing.
        events="".join(dice.choice(f"gggg{'go'[checks]}{'gt'[tiny]}z") for _ in range(steps)),
    )


def _shape(dice: random.Random) -> tuple[int, ...]:
    if dice.random() < 0.2:
        return (1,)
    return tuple(dice.randint(1, 20) for _ in range(dice.randint(1, 2)))
