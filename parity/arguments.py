"""List arguments, options and sets of laws that several operations share."""

from __future__ import annotations

from parity.operation import ListArgument, Option, Role

VALUE_LAWS = (
    "value",
    "nothing_else_written",
    "non_finite",
    "boundary_sizes",
    "permutation",
    "repeat",
)
OUTPUT_LAWS = ("value", "nothing_else_written", "every_output_written", *VALUE_LAWS[2:])
STEP_LAWS = (*OUTPUT_LAWS[:3], "skipped_step", *VALUE_LAWS[2:])
PACK_LAWS = ("value", "nothing_else_written", "every_output_written", "boundary_sizes", "repeat")
SCALER_LAWS = ("value", "nothing_else_written", "repeat")
FACTOR_LAWS = ("value", "nothing_else_written", "every_output_written", "repeat")

PARAMS = ListArgument(name="params", role=Role.PARAM)
GRADS = ListArgument(name="grads", role=Role.GRAD)
EXP_AVGS = ListArgument(name="exp_avgs", role=Role.MOMENT)
EXP_AVG_SQS = ListArgument(name="exp_avg_sqs", role=Role.SQUARE)
MOMENTUMS = ListArgument(name="momentums", role=Role.MOMENT, optional=True)
COPIES = ListArgument(name="copies", role=Role.OUTPUT, optional=True)
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
