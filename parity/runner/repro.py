"""Write a failing case as one stand-alone Python file.

The file needs torch (and Triton, if the kernel does), the kernel's file, and nothing of ours: the
guarded memory of every call is in it as hexadecimal bytes, with the bytes that are accepted. It
exits with 1 while the kernel breaks the law on this case, with 0 when it does not, with 4 if the
kernel cannot be loaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from twinstep.parity.cases.case import Case
from twinstep.parity.cases.guarded_memory import GuardedMemory, Span, moved_among, spans_of
from twinstep.parity.expected.accepted import Accepted
from twinstep.parity.expected.formula import tolerance
from twinstep.parity.expected.instruction_error import InstructionError
from twinstep.parity.expected.outputs import AcceptedOutputs, accepted_outputs, truths
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import (
    Check,
    Formula,
    Leaves,
    NoHostRead,
    Plan,
    Same,
    Unchanged,
    Untouched,
    Values,
)
from twinstep.parity.records.standalone import GUARD, repro_path
from twinstep.parity.runner.failure import Failure

CPU = torch.device("cpu")


def write_repro(
    failure: Failure,
    plan: Plan,
    folder: str,
    instruction_error: InstructionError,
    *,
    before: Sequence[Call] = (),
    times: int = 1,
) -> Failure:
    """Write the file into a folder; the failure with its path.

    Args:
        failure: shrunk.
        plan: calls and checks of its law on its case.
        folder: is created if it does not exist.
        instruction_error: what the kernel's instructions add to its bounds.
        before: calls that the failure needs.
        times: how often the calls are made at most, until the law is broken.
    """
    text = repro_text(failure, plan, instruction_error, before=before, times=times)
    names = (failure.kernel.name, failure.law, failure.case.combination)
    path = repro_path(folder, *names)
    path.write_text(text)
    return replace(failure, repro=str(path))


def repro_text(
    failure: Failure,
    plan: Plan,
    instruction_error: InstructionError,
    *,
    before: Sequence[Call] = (),
    times: int = 1,
) -> str:
    """The file's text."""
    template = resources.files("twinstep.parity.runner").joinpath("repro_template.txt").read_text()
    filled = {
        "GUARD": GUARD,
        "HEADLINE": failure.headline().replace("\\", "/").replace('"""', "'''"),
        "AGAIN": f"It {failure.again}." if failure.again else "",
        "KERNEL_FILE": repr(str(failure.kernel.file)),
        "KERNEL": repr(failure.kernel.name),
        "FUNCTION": repr(getattr(failure.kernel.function, "__name__", failure.kernel.name)),
        "ROOT": repr(str(Path(__file__).resolve().parents[2])),
        "ENGINE": repr(failure.engine),
        "BEFORE": _lines([_call(replace(call, reuse=None, moved=())) for call in before]),
        "CALLS": _lines([_call(call) for call in plan.calls]),
        "CHECKS": _lines(_checks(failure, plan, instruction_error)),
        "TIMES": repr(times),
    }
    for mark, text in filled.items():
        template = template.replace(f"@{mark}@", text)
    return template


def _lines(rows: list[dict[str, object]]) -> str:
    return "[\n" + "".join(f"    {row!r},\n" for row in rows) + "]"


def _call(call: Call) -> dict[str, object]:
    """Everything needed to lay out one call again."""
    case = call.case
    memory = GuardedMemory.of(case, CPU, call.moved)
    tensors = [
        (
            span.name,
            span.index,
            span.start,
            str(span.value.dtype)[6:],
            list(span.value.shape),
            list(span.strides),
        )
        for span in sorted(memory.spans, key=lambda span: span.index)
    ]
    return {
        "lists": [argument.name for argument in case.operation.lists],
        "tensors": tensors,
        "controls": list(case.controls),
        "options": dict(case.options),
        "leaves": list(case.leaves),
        "memory": _packed(memory.before, case.guard),
        "reuse": call.reuse,
        "moved": [
            (span.name, span.index)
            for name in call.moved
            for span in moved_among(memory.spans, name)
        ],
        "may_refuse": call.may_refuse,
        "lifted": call.lifted,
    }


def _packed(block: Tensor, guard: int) -> list[tuple[int, str]]:
    """The bytes as runs: (repetitions, hexadecimal digits)."""
    text, room, start = block.numpy().tobytes(), bytes([guard]), 0
    runs: list[tuple[int, str]] = []
    for gap in re.finditer(re.escape(room) + b"{16,}", text):
        runs += [(1, text[start : gap.start()].hex())] if gap.start() > start else []
        runs.append((gap.end() - gap.start(), room.hex()))
        start = gap.end()
    return [*runs, (1, text[start:].hex())] if start < len(text) else runs


def _checks(
    failure: Failure, plan: Plan, instruction_error: InstructionError
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for check in plan.checks:
        rows += _rows(check, plan, failure.kernel.arithmetic, instruction_error)
    return rows


def _rows(
    check: Check, plan: Plan, arithmetic: str, instruction_error: InstructionError
) -> list[dict[str, object]]:
    if isinstance(check, Values):
        case = plan.calls[check.call].case
        return _value_rows(case, check.call, accepted_outputs(case, arithmetic, instruction_error))
    if isinstance(check, Formula):
        return _formula_rows(plan.calls[check.call].case, check.call, arithmetic)
    if isinstance(check, Untouched):
        written = list(plan.calls[check.call].case.operation.writes)
        return [{"kind": "untouched", "call": check.call, "written": written}]
    if isinstance(check, NoHostRead | Leaves):
        return []
    if isinstance(check, Unchanged):
        return [{"kind": "unchanged", "call": check.call, "names": list(check.names)}]
    return _same_rows(check, plan.calls[check.first].case)


def _formula_rows(case: Case, call: int, arithmetic: str) -> list[dict[str, object]]:
    known, rows = truths(case), []
    for span in spans_of(case)[0]:
        truth = known.get((span.name, span.index))
        if truth is None or not span.value.numel():
            continue
        judged = torch.isfinite(truth.exact) & ~truth.zone
        row: dict[str, object] = {"kind": "formula", "call": call}
        row |= {"tensor": (span.name, span.index), "judged": judged.reshape(-1).tolist()}
        row |= {"want": [x.hex() for x in truth.exact.reshape(-1).tolist()]}
        room = tolerance(truth, arithmetic).reshape(-1)
        row |= {"tolerance": [x.hex() for x in room.tolist()]}
        rows.append(row)
    return rows


def _same_rows(check: Same, case: Case) -> list[dict[str, object]]:
    spans, _ = spans_of(case)
    rows: list[dict[str, object]] = []
    for span in spans:
        compared = check.names is None or span.name in check.names
        if span.name not in case.operation.writes or not compared:
            continue
        piece = check.piece(span)
        rows.append(
            {
                "kind": "same",
                "says": check.says,
                "calls": (check.first, check.second),
                "tensor": (span.name, span.index),
                "other": (span.name, piece.index, piece.start, piece.step),
                "sign": -1 if span.name in check.negated else 1,
                "power": dict(check.powers).get(span.name, 0),
            }
        )
    return rows


def _value_rows(case: Case, call: int, outputs: AcceptedOutputs) -> list[dict[str, object]]:
    spans, _ = spans_of(case)
    return [
        _value_row(span, outputs[span.name][span.index], call)
        for span in spans
        if span.name in case.operation.writes
    ]


def _value_row(span: Span, accepted: Accepted, call: int) -> dict[str, object]:
    row: dict[str, object] = {
        "kind": "values",
        "call": call,
        "tensor": (span.name, span.index),
        "want": _hex(accepted.value),
    }
    if accepted.low is not None and accepted.high is not None and accepted.zone is not None:
        bound = torch.zeros_like(accepted.zone, dtype=torch.float64)
        bound = bound if accepted.bound is None else accepted.bound
        row |= {"low": _hex(accepted.low), "high": _hex(accepted.high)}
        row |= {"zone": accepted.zone.reshape(-1).nonzero().reshape(-1).tolist()}
        row |= {"bound": [f"{x:.3g}" for x in bound.reshape(-1).tolist()]}
    return row


def _hex(tensor: Tensor) -> str:
    flat = tensor.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()).hex() if flat.numel() else ""
