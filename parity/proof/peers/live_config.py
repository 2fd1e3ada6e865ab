"""Random configurations of a mixed-precision training run, the same for both sides."""

from __future__ import annotations

import random
from dataclasses import dataclass

KINDS = ("flat", "unfused", "bf16")


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run.

    Attributes:
        seed: of the weights and the gradients.
        kind: `flat` (FP16Optimizer), `unfused` (FP16UnfusedOptimizer) or `bf16` (BF16Optimizer).
        shapes: of the parameters, by group.
        rates: learning rate of each group.
        decays: weight decay of each group.
        clip_grad: largest norm; 0 does not clip.
        static_scale: the loss scale; 0 means a dynamic one.
        init_scale: first dynamic scale.
        scale_window: clean steps until it grows.
        min_scale: floor of the dynamic scale.
        events: for each step `g` (gradients), `o` (an infinite loss) or `z` (gradients of zero).
        micro_batches: backward passes for each step.
        idle: parameter that has no gradient in every third step; -1 for none.
        external_scale: what overrides the loss scale; 0 for nothing.
        expert: parameter that is an expert's; -1 for none.
        reload: step after which model weights are halved and the own state is loaded without its
            fp32 weights; -1 for never.
    """

    seed: int
    kind: str
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    rates: tuple[float, ...]
    decays: tuple[float, ...]
    clip_grad: float
    static_scale: float
    init_scale: float
    scale_window: int
    min_scale: float
    events: str
    micro_batches: int
    idle: int
    external_scale: float
    expert: int
    reload: int

    @property
    def clips(self) -> bool:
        """True if a norm decides about the weights."""
        return self.clip_grad > 0

    @property
    def dynamic(self) -> bool:
        """True if the loss scale moves."""
        return self.kind != "bf16" and self.static_scale == 0


def drawn(seed: int, steps: int = 50) -> Config:
    """The configuration of a seed."""
    dice = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    groups = dice.choice((1, 1, 2, 3))
    shapes = tuple(tuple(_shape(dice) for _ in range(dice.randint(1, 4))) for _ in range(groups))
    clips = dice.random() < 0.4
    return Config(
        seed=seed,
        kind=kind,
        shapes=shapes,
        rates=tuple(dice.choice((1e-2, 3e-3, 0.1)) for _ in range(groups)),
        # Clipped runs are compared within a bound that plain gradient descent allows to state.
        decays=tuple(0.0 if clips else dice.choice((0.0, 0.01, 0.3)) for _ in range(groups)),
        clip_grad=dice.choice((0.05, 0.5, 3.0)) if clips else 0.0,
        static_scale=dice.choice((0.0, 0.0, 0.0, 1.0, 128.0, 1000.0)),
        init_scale=2.0 ** dice.randint(4, 18),
        scale_window=dice.choice((1, 2, 5, 1000)),
        min_scale=dice.choice((1.0, 64.0)),
        events="".join(dice.choice("gggggggoz") for _ in range(steps)),
        micro_batches=dice.choice((1, 1, 2, 3)),
        idle=dice.choice((-1, -1, 0)),
        external_scale=dice.choice((0.0, 0.0, 0.0, 8.0)) if kind != "bf16" else 0.0,
        expert=dice.choice((-1, -1, 0)) if kind == "unfused" else -1,
        reload=dice.choice((-1, 1, 4)) if kind == "bf16" else -1,
    )


def _shape(dice: random.Random) -> tuple[int, ...]:
    if dice.random() < 0.2:
        return (1,)
    return tuple(dice.randint(1, 40) for _ in range(dice.randint(1, 2)))
