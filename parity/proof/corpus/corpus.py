"""All shelves in one place."""

from __future__ import annotations

from twinstep.parity.proof.corpus import (
    harmless_adamw,
    harmless_compiled,
    harmless_launches,
    harmless_library,
    harmless_torch,
    wrong_adam_dtype,
    wrong_adam_formula,
    wrong_adam_state,
    wrong_apex_lamb,
    wrong_buffers,
    wrong_by_device,
    wrong_by_formula,
    wrong_by_input,
    wrong_by_law,
    wrong_by_memory,
    wrong_by_program,
    wrong_by_race,
    wrong_lamb,
    wrong_mixed,
    wrong_norm,
    wrong_scales,
    wrong_sgd,
    wrong_triton,
    wrong_unscale,
    wrong_upstream,
)
from twinstep.parity.proof.corpus.entry import Entry, Variant
from twinstep.parity.proof.corpus.optimizers import Optimizer
from twinstep.parity.proof.corpus.wrong_classes import WRONG_CLASSES

WRONG = (
    wrong_adam_formula,
    wrong_adam_dtype,
    wrong_adam_state,
    wrong_apex_lamb,
    wrong_lamb,
    wrong_sgd,
    wrong_unscale,
    wrong_norm,
    wrong_scales,
    wrong_buffers,
    wrong_by_formula,
    wrong_by_input,
    wrong_by_program,
    wrong_by_law,
    wrong_by_memory,
    wrong_by_race,
    wrong_by_device,
    wrong_mixed,
    wrong_triton,
    wrong_upstream,
)
HARMLESS = (
    harmless_torch,
    harmless_adamw,
    harmless_library,
    harmless_compiled,
    harmless_launches,
)


def corpus() -> tuple[Entry, ...]:
    """Every wrong kernel, grouped by operation."""
    return tuple(entry for module in WRONG for entry in module.SHELF)


def harmless() -> tuple[Variant, ...]:
    """Every variant that must be accepted."""
    return tuple(variant for module in HARMLESS for variant in module.SHELF)


def planted_classes() -> dict[str, Optimizer]:
    """Wrong optimizer classes by the row of docs/reference/bugs.md that they replant."""
    return {bug: row for row in WRONG_CLASSES for bug in row.bugs}
