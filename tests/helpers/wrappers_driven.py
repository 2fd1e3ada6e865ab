"""Mixed-precision optimizers under sequences of actions, as the tests of each class drive them."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from twinstep.parity.registry.engines import running
from twinstep.parity.sequences.drawing import sequence
from twinstep.parity.sequences.drive import Side, run
from twinstep.parity.sequences.house_optimizers import register_our_optimizers
from twinstep.parity.sequences.judge import TwinEffort, judge_twin, twin_engine
from twinstep.parity.sequences.registry import (
    REFERENCES,
    RULES,
    borrowed_twins,
    register_optimizer,
    twins,
)


def check_rejected(
    cls: type[torch.optim.Optimizer], dtype: str, *, sequences: int, seed: int
) -> None:
    """A class of ours with a fault breaks `sequences`, where the class that it derives from passes.

    Args:
        cls: its attribute `own` names private attributes that it adds.
        dtype: of the parameters.
        sequences: number of sequences within which it must be rejected.
        seed: of the sequences.
    """
    base = cls.__mro__[1].__name__
    with borrowed_twins():
        register_our_optimizers()
        right = next(twin for twin in twins() if twin.name == f"fast.{base}")
    with borrowed_twins() as found:
        register_optimizer(
            cls.__name__,
            reference=base,
            arithmetic="exact",
            dtypes=(dtype,),
            private=(*right.private, *getattr(cls, "own", ())),
            engines=right.engines,
        )(cls)
    effort = TwinEffort(sequences=sequences, seed=seed, repros=None, shrunk_by=0)
    cell = judge_twin(found[0], dtype, twin_engine(found[0]), effort)
    assert "breaks `sequences`" in cell.failure
    assert "Error" not in cell.failure, f"rejected for the wrong reason: {cell.failure}"
    acts = sequence(right.rules, seed, dtype, cell.sequences - 1)
    with running(twin_engine(right)):
        assert run(right, dtype, "cpu", acts) is None, "the right one is rejected as well"


class Reached(NamedTuple):
    """Actions of forty sequences on a reference class.

    Attributes:
        names: how often each action was done.
        raised: how often each was refused, where it was refused at all.
        skipped: number of steps that left weights and state alone.
    """

    names: Counter[str]
    raised: Counter[str]
    skipped: int


def reached(name: str) -> Reached:
    """Every action of 96 sequences of mixed dtypes on a reference class."""
    reference = REFERENCES[name]
    rules, names, raised, skipped = RULES[reference], Counter[str](), Counter[str](), 0
    for number in range(96):
        side = Side(reference, rules, "mixed", "cpu")
        for act in sequence(rules, 0, "mixed", number):
            side.carry_out(act)
            names[act.name] += 1
            if "raised" in side.outcome:
                raised[act.name] += 1
            assert side.world is not None
            if act.name in ("step", "train"):
                skipped += bool(getattr(side.world.optimizer, "overflow", False))
    assert set(names) == set(rules.actions())
    return Reached(names, raised, skipped)
