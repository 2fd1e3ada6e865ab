"""Whole runs that are recorded: optimizers around a tiny model, step by step.

Two parameters, of three and of one element, in one group or two; the true gradient is (1, 2, 2) and
(4), so that its norm is 5 and every sum of squares is exact. The letter of a step:

    g  the gradient            b  half of it              z  zero
    o  an infinity in the last element                    i  minus infinity in the second
    n  a NaN in the first element                         q  both infinities
    h  2**66 times the gradient: finite, and its squares are not
    m  an infinity in the first micro-batch alone         p  an infinity on the last rank alone
    R  a new object that has loaded what was saved, then g
    X  the loss scale is overridden by `override`, then g
    L  learning rates are halved, then g

Learning rates are 1/16 and 1/8: around plain gradient descent every update is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from twinstep.golden.sequences import DIVIDED, QUIET, TRUE_NORM, WHOLE, Situation
from twinstep.golden.trace import Constant

Constants = Mapping[str, Constant]
SCALED: Constants = {
    "adamw": False,
    "groups": 1,
    "weight_decay": 0.0,
    "clip_grad": 0.0,
    "micro_batches": 1,
    "scale_window": 1000,
    "min_scale": 1.0,
    "override": 0.0,
}
PLAIN: Constants = {
    name: SCALED[name] for name in ("adamw", "groups", "weight_decay", "clip_grad", "micro_batches")
}
ZERO: Constants = {**SCALED, "delayed_shift": 1, "stage": 1, "ranks": 1, "bf16": False}
OPTIM: Constants = {
    "adamw": True,
    "groups": 1,
    "weight_decay": 0.0,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
}
LAMB: Constants = {"groups": 1, "weight_decay": 0.0, "max_coeff": 10.0, "min_coeff": 0.01}
USUAL: Mapping[str, Constants] = {
    "flat": SCALED,
    "unfused": SCALED,
    "bf16": PLAIN,
    "zero": ZERO,
    "adam": OPTIM,
    "lamb": LAMB,
    "flat_lamb": {**SCALED, **LAMB},
}


class Row(NamedTuple):
    """A run as it is written below.

    Attributes:
        rule: a key of `USUAL`.
        name: what happens in it.
        steps: one letter per step.
        changed: constants that are not the usual ones.
        differs: see `golden.sequences.Situation`.
        differs_in: names with spaces between.
    """

    rule: str
    name: str
    steps: str
    changed: Constants = {}
    differs: str = ""
    differs_in: str = ""


def situation(row: Row) -> Situation:
    """The situation of a row; fp16 starts from a scale of 16."""
    constants = {**USUAL[row.rule], **row.changed}
    unscaled = row.rule in ("bf16", "adam", "lamb") or bool(constants.get("bf16"))
    return Situation(
        name=row.name,
        rule=row.rule,
        scale=1.0 if unscaled else 16.0,
        constants=constants,
        steps=row.steps,
        differs=row.differs,
        differs_in=tuple(row.differs_in.split()),
    )


ADAMW: Constants = {"adamw": True}
DECAYED: Constants = {"adamw": True, "weight_decay": 0.125}
TWO: Constants = {"groups": 2}
MICRO: Constants = {"micro_batches": 2}
SHORT: Constants = {"scale_window": 2}
CLIP: Constants = {"clip_grad": 2.5}
SECOND: Constants = {"stage": 2}
PAIR: Constants = {"ranks": 2}
BF16: Constants = {"bf16": True}
DS_NORM = "norm"
ROWS = (
    Row("flat", "overflow_at_the_first_step", "oggg"),
    Row("flat", "burst_down_to_the_floor", "goooooogg"),
    Row("flat", "overflow_at_the_windows_edge", "ggogg", SHORT),
    Row("flat", "growth", "ggggg", SHORT, WHOLE, "weights norm"),
    Row("flat", "nan_and_both_infinities", "gnigoqg"),
    Row("flat", "one_micro_batch", "gmgg", MICRO),
    Row("flat", "clipped", "gbogg", {**CLIP, **TWO}),
    Row("flat", "several_groups", "gogLg", TWO),
    Row("flat", "resumed", "goRggg", TWO),
    Row("flat", "overridden_in_mid_run", "ggXgog", {"override": 64.0}, DIVIDED, "weights norm"),
    Row("flat", "zero_gradients", "gzg"),
    Row("flat", "adamw", "ggog", ADAMW, QUIET, "weights"),
    Row("flat", "adamw_decayed_several_groups", "oggbog", {**DECAYED, **TWO}, QUIET, "weights"),
    Row("flat", "adamw_resumed", "gogRgLg", {**DECAYED, **TWO}, QUIET, "weights"),
    Row("unfused", "overflow_at_the_first_step", "oggg", {}, TRUE_NORM, DS_NORM),
    Row("unfused", "burst_down_to_the_floor", "goooooogg", {}, TRUE_NORM, DS_NORM),
    Row("unfused", "nan_and_both_infinities", "gnigoqg", {}, TRUE_NORM, DS_NORM),
    Row("unfused", "one_micro_batch", "gmgg", MICRO, TRUE_NORM, DS_NORM),
    Row("unfused", "resumed", "goRggg", TWO, TRUE_NORM, DS_NORM),
    Row(
        "unfused",
        "adamw_several_groups",
        "gogbg",
        {**DECAYED, **TWO},
        TRUE_NORM,
        "norm weights",
    ),
    Row("bf16", "adamw", "gogbgzg", ADAMW),
    Row("bf16", "adamw_decayed_several_groups", "oggLg", {**DECAYED, **TWO}),
    Row("bf16", "nan_and_both_infinities", "gnigoqg"),
    Row("bf16", "squares_overflow", "ghg"),
    Row("bf16", "one_micro_batch", "gmgg", MICRO),
    Row("bf16", "resumed", "goRgg", {**ADAMW, **TWO}),
    Row("zero", "stage_one", "gogg", TWO),
    Row("zero", "stage_two", "gogg", {**SECOND, **TWO}),
    Row("zero", "hysteresis_down_to_the_floor", "ggooogg", {"delayed_shift": 2, "min_scale": 4.0}),
    Row("zero", "growth", "ggggg", SHORT, WHOLE, "weights"),
    Row("zero", "nan_and_both_infinities", "gnigoqg"),
    Row("zero", "stage_one_on_two_ranks", "gogbg", {**PAIR, **TWO}),
    Row("zero", "stage_two_on_two_ranks", "gogbg", {**PAIR, **SECOND, **TWO}),
    Row("zero", "overflow_on_one_rank", "gpgpg", {**PAIR, **SECOND}),
    Row("zero", "one_micro_batch_on_two_ranks", "gmgg", {**PAIR, **SECOND, **MICRO}),
    Row("zero", "clipped_on_two_ranks", "gbog", {**PAIR, **CLIP, **TWO}),
    Row("zero", "adamw_on_two_ranks", "gogbg", {**PAIR, **DECAYED, **TWO}),
    Row("zero", "bf16_on_two_ranks", "gpgg", {**PAIR, **BF16}),
    Row("zero", "bf16_adamw", "gogg", {**BF16, **ADAMW, **SECOND}),
    Row("adam", "adamw", "ggbzg", {"weight_decay": 0.125}),
    Row("adam", "adam_l2", "ggbzg", {"adamw": False, "weight_decay": 0.125}),
    Row("adam", "several_groups_and_new_rates", "ggLgLg", {"groups": 2, "weight_decay": 0.125}),
    Row("adam", "short_memory", "gbzgg", {"beta1": 0.5, "beta2": 0.75, "eps": 0.25}),
    Row("adam", "no_memory", "gbg", {"beta1": 0.0, "beta2": 0.0}),
    Row("adam", "resumed", "ggRgg"),
)
RUNS = tuple(map(situation, ROWS))
# Recorded from our reference: LAMB of others needs a GPU.
OWN_ROWS = (
    Row("lamb", "several_groups", "ggbLg", {"groups": 2, "weight_decay": 0.125}),
    Row("lamb", "bounded_coefficients", "gbg", {"max_coeff": 0.5, "min_coeff": 0.25}),
    Row("lamb", "zero_gradients", "gzg"),
    Row("lamb", "resumed", "gRgg", {"weight_decay": 0.125}),
    Row("flat_lamb", "overflow_and_growth", "ogggogg", SHORT),
    Row("flat_lamb", "clipped_and_resumed", "goRbg", {**CLIP, **TWO, "weight_decay": 0.125}),
)
OWN = tuple(map(situation, OWN_ROWS))
OWN_RULES = ("lamb", "flat_lamb")
