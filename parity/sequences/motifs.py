"""Runs of actions on any optimizer that random drawing rarely meets, by name."""

from __future__ import annotations

from collections.abc import Mapping

from twinstep.parity.sequences.actions import Motif, Step
from twinstep.parity.sequences.parts import FADED

PLAIN: Step = ("train", {"missing": 0, "regime": "ordinary"})
PARTLY: Step = ("train", {"missing": 1, "regime": "ordinary"})
TWO_ALIKE = ("build", {"groups": 2, "alike": True})
OVERFLOW = ("train", {"regime": "planted"})
CLEAR = ("zero_grad", {"how": "as it is"})
ZERO: Step = ("zero_grad", {"how": "zero"})
GRAPH: Step = ("fill_strangely", {"layout": "graph", "every": 1})
FREEZE = ("freeze", {"trained": False})
FROZEN, THAWED = (
    [("freeze", {"number": at, "trained": trained}) for at in range(4)] for trained in (False, True)
)
# Steps of a long run. What has become infinite or NaN would hide all that follows.
STEPS = 104
LASTING: Motif = (
    *(("train", {"regime": "ordinary"}),) * STEPS,
    *("set_hyper", ("lower_rate", {"bits": 4}), ("train", {"regime": "ordinary"})) * 3,
    # Rates in tensors that are changed in place, between steps some of which update nothing.
    "hold_rates",
    ("train", {"regime": "ordinary", "missing": 0}),
    ("lower_rate", {"bits": 4, "group": 0}),
    ("lower_rate", {"bits": 4, "group": 1}),
    ("lower_rate", {"bits": 4, "group": 2}),
    ("train", {"regime": "ordinary", "missing": 0}),
    *(("train", {"missing": 7}), ("train", {"regime": "ordinary"})),
)


def last_of_a_correction(step: Step) -> Motif:
    """A step for each count at which Adam's correction of the bias is nearly over."""
    aged = (one for count in FADED for one in (("age", {"count": count, "since": 1}), step))
    return (step, "raise_rates", *aged)


def each_turned(step: Step) -> Motif:
    """A step after each hyper-parameter has changed alone."""
    return (step, *(one for at in range(9) for one in (("turn_hyper", {"number": at}), step)))


COMMON: Mapping[str, Motif] = {
    "each hyper-parameter alone": each_turned(PLAIN),
    "groups that differ in one field": (TWO_ALIKE, "set_hyper", "train", "train"),
    "overflow before a save": (OVERFLOW, "save", "load", "train", CLEAR),
    "overflow before a resume": (OVERFLOW, "resume", "train", CLEAR),
    "a save in a streak of overflows": (
        *(OVERFLOW, OVERFLOW, "save", OVERFLOW, "load", OVERFLOW, "train"),
    ),
    "24 bits of counters full": ("train", ("age", {"count": 2**24 - 2}), *("train",) * 3),
    "31 bits of counters full": ("train", ("age", {"count": 2**31 - 2}), *("train",) * 3),
    "31 bits of counters full, gradients for all": (
        *("initialize_states", ("age", {"count": 2**31 - 2})),
        *(PLAIN, PLAIN, PLAIN),
        "resume",
    ),
    "the last of a correction": last_of_a_correction(PLAIN),
    "gradients that live": ("backward", CLEAR, "backward", CLEAR, "step"),
    "gradients that are zeroed": ("backward", "zero_grad", "backward", "step", GRAPH, ZERO, "step"),
    "a frozen parameter with a gradient": ("fill", FREEZE, FREEZE, "step", "step"),
    "a frozen parameter without": ("train", FREEZE, "zero_grad", "backward", "step", "step"),
    "zeroed while frozen": ("backward", *FROZEN, ("zero_grad", {"how": "zero"}), *THAWED, "step"),
    "a damaged state": ("train", "load_damaged", "load_damaged", "train"),
    "a damaged first state": ("load_damaged", "load", "train"),
    "transposed gradients": (
        *(("fill_strangely", {"layout": "transposed"}), "step", "step"),
        *(GRAPH, ZERO, "step"),
    ),
    "gradients with a graph": (
        *(GRAPH, ZERO, GRAPH, "step", ZERO, "train"),
        *("set_hyper", GRAPH, ZERO, "step"),
    ),
    "gradients in a strange layout": (
        *(("build", {"groups": 2}), ("fill_last_strangely", {"layout": "sparse"}), "step"),
        *("zero_grad", "fill_strangely", "step", "zero_grad", "train"),
    ),
    "a closure after a step": ("train", "step_with_closure", CLEAR, "step"),
    "a closure that fails": (("step_with_closure", {"fails": True}), "train"),
    "counters set in place": ("train", ("set_counts", {"count": 3}), "train"),
    "a group that comes late": ("train", "add_group", "train", "resume", "train"),
    "two states between steps": ("train", "save", "set_hyper", "save", "train"),
    "other betas before late gradients": (
        *(PARTLY, ("turn_hyper", {"number": 1}), PLAIN, "raise_rates", PLAIN),
    ),
    "a file that lacks some states": (*(PARTLY, "save", PLAIN, "load", PLAIN),),
    "a state that is kept": ("train", "keep", "train", "load_kept", "train", "load_kept"),
    "a copy": ("train", "copy", "train"),
    "rates that nearly agree": (TWO_ALIKE, "part_rates", PLAIN, PLAIN),
    "a rate that falls": (*("train", ("lower_rate", {"bits": 10})) * 2, "train"),
    "a refused construction": ("construct_in_every_wrong_way",),
}
