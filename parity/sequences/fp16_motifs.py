"""Runs of actions on an FP16 wrapper that random drawing rarely meets."""

from __future__ import annotations

from collections.abc import Mapping

from twinstep.parity.sequences.actions import Motif
from twinstep.parity.sequences.fills import INF, NAN
from twinstep.parity.sequences.motifs import (
    COMMON,
    FROZEN,
    THAWED,
    each_turned,
    last_of_a_correction,
)

# Factors of a loss; the last one overflows in every dtype.
SIZES = (1.0, 1.0, 1.0, 1e-3, 1e4, 1e30, INF)
AS_SAVED = {"inside": "as saved"}
OVERFLOW, CLEAN = ("train", {"size": INF}), ("train", {"size": 1.0})

# The optimizer inside reads its rates as it does alone, and nothing is missing in `train`.
INSIDE = (
    *("a rate that falls", "other betas before late gradients", "a file that lacks some states"),
)
MOTIFS: Mapping[str, Motif] = {
    **{name: row for name, row in COMMON.items() if name not in INSIDE},
    **{
        f"an active clip around {recipe}": (
            ("build", {"recipe": recipe}),
            ("set_clip", {"limit": 1e-3}),
            *(CLEAN, CLEAN, "step"),
        )
        for recipe in ("adamw, none", "sgd, none, sum")
    },
    "groups of unequal norms": (
        ("build", {"groups": 2}),
        ("set_clip", {"limit": 1e-3}),
        *(("train", {"size": 1e4}), CLEAN),
    ),
    "a clip norm below zero": (("set_clip", {"limit": -1.0}), ("train", {"size": 1e4})),
    "a clip norm of before a load": (
        *(("set_clip", {"limit": 0.5}), "save"),
        *(("set_clip", {"limit": 1e-3}), "load", CLEAN),
        *(("set_clip", {"limit": 0.0}), "save"),
        *(("set_clip", {"limit": 1e-3}), "load", CLEAN),
    ),
    "overflow before a save": (OVERFLOW, "save", "load", CLEAN),
    "overflow before a resume": (OVERFLOW, "resume", CLEAN),
    "a save in a streak of overflows": (
        *(OVERFLOW, OVERFLOW, "save"),
        *(OVERFLOW, "load", OVERFLOW, CLEAN, CLEAN),
    ),
    "the last of a correction": last_of_a_correction(CLEAN),
    "each hyper-parameter alone": each_turned(CLEAN),
    "rates that nearly agree": (("build", {"groups": 2, "alike": True}), "part_rates", CLEAN),
    "rates set that nearly agree": (
        *(("change_lr", {"lr": 0.013}), ("change_lr", {"lr": 0.0130001}), CLEAN),
        *(("change_lr", {"lr": 0.0}), ("change_lr", {"lr": 3e-9}), CLEAN),
    ),
    # Only a scale that counts steps shows where the counter ends.
    "31 bits of a moving scale's counters full": (
        ("build", {"recipe": "adamw, dynamic"}),
        *("train", ("age", {"count": 2**31 - 2}), *(CLEAN,) * 3),
    ),
    "overflows in one tensor of three groups": (
        # The groups of this seed have parameters that are trained, with any recipe.
        *(("build", {"groups": 3, "seed": 5}), *(OVERFLOW,) * 16),
    ),
    "the edge of a window": (("age", {"since": 998}), *(CLEAN,) * 4),
    "overflow at the edge of a window": (("age", {"since": 999}), CLEAN, OVERFLOW, CLEAN),
    "graphs that are kept": (
        ("backward", {"graph": "retain", "size": 1.0}),
        ("backward", {"graph": "create", "size": 1.0}),
        "step",
    ),
    "a graph that is used again": (("backward", {"graph": "again"}), "step"),
    "a scale that is large": (("assign_scale", {"scale": 2.0**100}), CLEAN, CLEAN),
    "scales that are none": (
        *(("assign_scale", {"scale": scale}) for scale in (NAN, INF, -1.0)),
        *(("override", {"scale": scale}) for scale in (NAN, INF, -1.0)),
        *(("assign_scale", {"scale": 2.0**41}), CLEAN),
    ),
    "a scale from outside over an overflow": (
        ("override", {"scale": 64.0}),
        *(CLEAN, OVERFLOW, CLEAN),
        ("override", {"scale": 0.0}),
        CLEAN,
    ),
    "a scale assigned under one from outside": (
        *(("override", {"scale": 64.0}), ("assign_scale", {"scale": 32.0}), CLEAN),
        *(("override", {"scale": 0.0}), CLEAN),
    ),
    "a load of weights alone, whatever is inside": (
        *(
            ("build", {"recipe": "adamw, none"}),
            CLEAN,
            "save",
            ("load_weights_alone", {"inside": "of another"}),
            CLEAN,
        ),
        *(("load_weights_alone", {"inside": "none"}), CLEAN),
    ),
    "rates that a load leaves": (
        *(CLEAN, "save", ("change_lr", {"lr": 0.5}), ("load_weights_alone", AS_SAVED), CLEAN),
    ),
    "masters that are refreshed": (
        # Without a scale the first steps are no overflows.
        *(("build", {"recipe": "adamw, none"}), CLEAN, CLEAN),
        *(("load_weights", {"seed": 1}), ("load_weights", {"seed": 2}), CLEAN),
    ),
    "seventeen overflows in a row": (
        # One group may have no element in which to overflow.
        ("build", {"recipe": "adamw, dynamic", "groups": 3}),
        *(("assign_scale", {"scale": 2.0**41}), *(OVERFLOW,) * 17, CLEAN),
    ),
    "a state that is kept, offloaded": (
        *(CLEAN, ("keep", {"offloaded": True}), CLEAN, CLEAN, "load_kept"),
    ),
    "a copy under a scale from outside": (
        *(("override", {"scale": 64.0}), ("look_at_copy", {"how": "deepcopy"})),
        ("look_at_copy", {"how": "pickle"}),
    ),
    "an older file": (*(CLEAN, "load_older", CLEAN),),
    "a rate that is no number": (CLEAN, *("step_on_text", CLEAN)),
    "weights loaded between steps": (CLEAN, "load_weights", CLEAN),
    "weights loaded before a step": (("backward", {"size": 1.0}), "load_weights", "step"),
    "a rate in a tensor that is set, and a clip norm behind a save": (
        *(CLEAN, "hold_rates", "change_lr", CLEAN),
        *("save", ("set_clip", {"limit": 1e-3}), "load", CLEAN),
    ),
    "weights loaded while frozen": (CLEAN, *FROZEN, "load_weights", *THAWED, CLEAN),
}
