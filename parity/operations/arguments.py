"""List arguments, options and sets of laws that several operations share."""

from __future__ import annotations

from twinstep.parity.operations.operation import ListArgument, Option, Role

# The order of the table's columns.
ORDER = (
    "value",
    "formula",
    "nothing_else_written",
    "every_output_written",
    "uninitialised",
    "skipped_step",
    "after_skip",
    "non_finite",
    "boundary_sizes",
    "alignment",
    "strided",
    "permutation",
    "splitting",
    "sign_symmetry",
    "power_of_two",
    "repeat",
    "race_free",
    "large_index",
    "no_host_read",
    "graph_capture",
    "process_state",
)


def in_order(*laws: str) -> tuple[str, ...]:
    """Names of laws in the order of the table's columns."""
    return tuple(sorted(laws, key=ORDER.index))


def without(laws: tuple[str, ...], *names: str) -> tuple[str, ...]:
    """The laws but for these."""
    return tuple(law for law in laws if law not in names)


# What holds for every kernel, and for every kernel that takes tensors.
CALL_LAWS = (
    "value",
    "nothing_else_written",
    "uninitialised",
    "repeat",
    "race_free",
    "no_host_read",
    "graph_capture",
    "process_state",
)
LIST_LAWS = (*CALL_LAWS, "boundary_sizes", "alignment", "strided")
PACK_LAWS = in_order(*LIST_LAWS, "every_output_written")
VALUE_LAWS = in_order(
    *LIST_LAWS, "formula", "non_finite", "permutation", "splitting", "sign_symmetry"
)
OUTPUT_LAWS = in_order(*VALUE_LAWS, "every_output_written")
STEP_LAWS = in_order(*OUTPUT_LAWS, "skipped_step", "after_skip", "power_of_two", "large_index")
SCALER_LAWS = in_order(*CALL_LAWS, "power_of_two")
FACTOR_LAWS = in_order(*CALL_LAWS, "every_output_written")

PARAMS = ListArgument(name="params", role=Role.PARAM)
GRADS = ListArgument(name="grads", role=Role.GRAD)
EXP_AVGS = ListArgument(name="exp_avgs", role=Role.MOMENT)
EXP_AVG_SQS = ListArgument(name="exp_avg_sqs", role=Role.SQUARE)
MOMENTUMS = ListArgument(name="momentums", role=Role.MOMENT, optional=True)
COPIES = ListArgument(name="copies", role=Role.OUTPUT, optional=True)
REMAINDERS = ListArgument(name="remainders", role=Role.CODE)
STEPS = ListArgument(name="steps", role=Role.STEPS)
TENSORS = ListArgument(name="tensors", role=Role.VALUE)
TENSORS_OUT = ListArgument(name="tensors", role=Role.OUTPUT)
FLAT = ListArgument(name="flat", role=Role.VALUE, single=True)
FLAT_OUT = ListArgument(name="flat", role=Role.OUTPUT, single=True)
ACCUMULATORS = ListArgument(name="accumulators", role=Role.VALUE)
SOURCES = ListArgument(name="sources", role=Role.PARAM)
CAST_OUT = ListArgument(name="copies", role=Role.OUTPUT)
BIAS_CORRECTION = Option(name="bias_correction", choices=(True, False))
EPS_INSIDE = Option(name="eps_inside_sqrt", choices=(False, True))
NESTEROV = Option(name="nesterov", choices=(False, True))
SLOT = Option(name="slot", choices=(16, 1, 4, 7))
CONSECUTIVE = Option(name="consecutive_hysteresis", choices=(False, True))
RAISE_AT_MIN = Option(name="raise_error_at_min_scale", choices=(True, False))
RULE = Option(name="rule", choices=("dynamic", "torch", "wrapper", "static"))
