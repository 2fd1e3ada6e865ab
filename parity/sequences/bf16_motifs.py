"""Runs of actions that the BF16 wrapper needs and random drawing rarely meets."""

from __future__ import annotations

from collections.abc import Mapping

from twinstep.parity.sequences.actions import Motif, Step
from twinstep.parity.sequences.motifs import COMMON, FROZEN, THAWED

REFRESH: Step = ("load_weights", {"number": 0})
WEIGHT: Step = ("whole", {"number": 0, "key": ""})
MOMENT: Step = ("whole", {"number": 0, "key": "exp_avg"})
SET_WEIGHT: Step = ("set_whole", {"number": 0, "key": ""})
SET_MOMENT: Step = ("set_whole", {"number": 0, "key": "exp_avg"})
UNIVERSAL: Step = ("load_universal", {"states": True, "missing": ""})
MOTIFS: Mapping[str, Motif] = {
    **COMMON,
    "groups of unequal norms": (
        ("build", {"groups": 2, "clip": 0.05}),
        ("train", {"regime": "ordinary"}),
        ("train", {"regime": "ordinary"}),
    ),
    "gradients that live": ("backward", "zero_grad", "backward", "step"),
    "accumulated gradients": ("backward", "backward", "reduce", "step"),
    "gradients clipped by hand": (
        *("backward", ("grads_for_norm", {"clipping": True, "half": True}), "step"),
    ),
    "weights loaded between steps": (
        *("train", ("load_weights", {"seed": 1}), ("load_weights", {"seed": 2}), "train"),
    ),
    "a rate in a tensor that is set": ("train", "hold_rates", "set_lr", "train"),
    "rates set that nearly agree": (
        *(("set_lr", {"lr": 0.03}), ("set_lr", {"lr": 0.0300001}), "train"),
        *(("set_lr", {"lr": 0.0}), ("set_lr", {"lr": 3e-9}), "train"),
    ),
    "weights loaded before a step": ("backward", REFRESH, "step"),
    "weights loaded while frozen": ("train", *FROZEN, REFRESH, *THAWED, "train"),
    "a weight and a state by name": (
        *("train", WEIGHT, SET_WEIGHT, WEIGHT, REFRESH, WEIGHT, MOMENT, SET_MOMENT, MOMENT),
    ),
    "a universal checkpoint": (
        *(("build", {"clip": 0.05, "omitted": False}), "train", UNIVERSAL, "train", "train"),
    ),
    "a part of a universal checkpoint": ("train", "load_universal", "load_universal", "train"),
    "rates that a load leaves": (
        *("train", "save", ("set_lr", {"lr": 1e-4}), ("load", {"states": False}), "train"),
    ),
    "a state that is kept, offloaded": (
        *("train", ("keep", {"offloaded": True}), "train", "train", "load_kept"),
    ),
    "graphs that are kept": (("backward", {"graph": "retain"}), "backward", "step"),
    "a graph that is used again": (("backward", {"graph": "again"}), "step"),
}
