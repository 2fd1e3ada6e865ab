"""The text of a failing sequence: the kind of fault, both values, what was built, the actions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from twinstep.parity.records.standalone import command_for
from twinstep.parity.sequences.actions import Rules
from twinstep.parity.sequences.drive import Mismatch, Side, sides_over_ranks
from twinstep.parity.sequences.observe import Difference
from twinstep.parity.sequences.over_ranks.compare import STOPPED
from twinstep.parity.sequences.registry import Twin
from twinstep.parity.sequences.world import Act, World

CHECKPOINTS = frozenset({"state_dict", "load_state_dict", "refresh_fp32_params"})
COUNTER = re.compile(r"\.step(\[|$)|steps|iter|counter|tracker|hysteresis")
LACKING = re.compile(r"AttributeError: .*has no attribute '(\w+)'")
RAISED = "dict of 1: raised"
TENSORS = ("tensor", "parameter")
SHOWN = 6
# Actions of a failing sequence that are listed.
LISTED = 40


def kind_of(difference: Difference, act: Act, rules: Rules) -> str:
    """The kind of fault: what of the optimizer differs, and in what way."""
    if difference.path.endswith("process"):
        return "process"
    if difference.path == STOPPED:
        return STOPPED
    lacking = LACKING.search(difference.got)
    if lacking:
        return f"attribute missing: {lacking[1]}"
    if difference.path.split(".")[0] == "outcome":
        return _of_outcome(difference)
    what = _difference(difference)
    declared = rules.actions().get(act.name)
    through_file = declared is not None and bool(CHECKPOINTS & set(declared.drives))
    return f"checkpoint, {what}" if through_file else what


def _of_outcome(difference: Difference) -> str:
    """The kind where an action ends otherwise: by `outcome` alone if only one side raises."""
    if difference.path != "outcome":
        return "another exception" if difference.path == "outcome.raised" else "return value"
    return "exception" if difference.got.startswith(RAISED) else "refusal missing"


def _difference(difference: Difference) -> str:
    got, want, path = difference.got, difference.want, difference.path
    if "nothing" in (got, want):
        owner = "attribute" if path.startswith("optimizer.") and path.count(".") == 1 else "entry"
        return f"{owner} {'missing' if got == 'nothing' else 'too much'}"
    if path.startswith("events"):
        return "hooks"
    if "  0x" in got and "  0x" in want:
        return "counter" if COUNTER.search(path) else "value"
    if any("the same" in says or "shares memory" in says for says in (got, want)):
        return "aliasing"
    return next((kind for kind, differs in KINDS if differs(got, want)), "value")


def _type(says: str) -> str:
    return says.split()[0]


def _dtype(says: str) -> str:
    return says.split()[1] if _type(says) in TENSORS else ""


# Kinds of two texts that differ; the first that fits.
KINDS: tuple[tuple[str, Callable[[str, str], bool]], ...] = (
    ("type", lambda got, want: _type(got) != _type(want)),
    ("dtype", lambda got, want: _dtype(got) != _dtype(want)),
    ("entries", lambda got, want: _type(got) in ("dict", "list", "tuple")),
    ("shape or device", lambda got, want: _type(got) in TENSORS),
)


def headline(twin: Twin, dtype: str, engine: str, mismatch: Mismatch, act: Act) -> str:
    """Class, kind of fault and place in one line."""
    kind, over = kind_of(mismatch.difference, act, twin.rules), mismatch.over
    what = f"{mismatch.difference.path} differs from the reference after"
    if mismatch.difference.path == STOPPED:
        what = "waits for a collective that other ranks do not call in"
    where = f"{over.who}: " if over is not None else ""
    groups = f"; {over.groups}" if over is not None and over.groups else ""
    return (
        f"{twin.reference.__name__}[{twin.name}, {dtype}, {engine}] breaks `sequences` ({kind}): "
        f"{where}{what} {act}{groups}"
    )


def failure_text(
    first: str,
    twin: Twin,
    dtype: str,
    acts: Sequence[Act],
    mismatch: Mismatch,
    drawn: str,
    again: str = "",
    repro: str = "",
) -> str:
    """The whole failure text.

    Args:
        first: the headline.
        twin: that fails.
        dtype: of the parameters.
        acts: shrunk.
        mismatch: after the last of them.
        drawn: source of the sequence.
        again: how the repro file fails, where that needs a word.
        repro: its path, or empty.
    """
    lines = [
        first,
        f"  got      {mismatch.difference.got}",
        f"  want     {mismatch.difference.want}",
    ]
    if mismatch.difference.differ:
        lines.append(f"  differ   {mismatch.difference.differ}")
    hints = () if mismatch.over is None else mismatch.over.hints
    lines += [f"  {'ranks' if at == 0 else '':8} {hint}" for at, hint in enumerate(hints)]
    if kind_of(mismatch.difference, acts[-1], twin.rules) == "refusal missing":
        lines.append("  or       rules without this action, if the class need not refuse")
    if mismatch.accepted is not None:
        lines.append(f"  accepted {_interval(mismatch)}")
    rank = None if mismatch.over is None else mismatch.over.rank
    rows = built(twin, dtype, acts, rank)
    lines += [f"  {'built' if at == 0 else '':8} {row}" for at, row in enumerate(rows)]
    listed = [str(act) for act in acts]
    if len(listed) > LISTED:
        listed[LISTED // 2 : -LISTED // 2] = [f"... {len(listed) - LISTED} more"]
    lines += [f"  {'actions' if place == 0 else '':8} {act}" for place, act in enumerate(listed)]
    lines.append(f"  drawn    {drawn}")
    if again:
        lines.append(f"  again    {again}")
    if repro:
        lines.append(f"  repro    {command_for(repro)}")
    return "\n".join(lines)


def _interval(mismatch: Mismatch) -> str:
    assert mismatch.accepted is not None
    low, high, _ = mismatch.accepted
    place = int(mismatch.difference.path.rpartition("[")[2].rstrip("]"))
    ends = (end.reshape(-1)[place].item() for end in (low, high))
    return " to ".join(f"{end!r}" for end in ends)


def built(twin: Twin, dtype: str, acts: Sequence[Act], rank: int | None = None) -> list[str]:
    """Result of the first action: parameters with their memory, hyper-parameters, options.

    Args:
        twin: the pair.
        dtype: of the parameters.
        acts: the first one builds.
        rank: number of the rank, of a sequence over ranks.
    """
    if rank is None:
        side = Side(twin.reference, twin.rules, dtype, "cpu")
        side.carry_out(acts[0])
    else:
        side = sides_over_ranks(twin.reference, twin, dtype, "cpu", acts[:1])[1][rank]
    if side.world is None:
        return []
    world = side.world
    rows = [_parameters(world)]
    for number, group in enumerate(getattr(world.optimizer, "param_groups", ())):
        named = cast("Mapping[str, object]", group)
        values = {name: value for name, value in named.items() if name != "params"}
        count = len(cast("Sequence[object]", named["params"]))
        rows.append(f"group {number}, {count} parameters: {_settings(values)}")
    return [*rows, *([f"options: {_settings(world.options)}"] if world.options else [])]


def _parameters(world: World) -> str:
    """Dtype, shape, and strides or shared memory where they are not the usual ones."""
    storages = [param.untyped_storage().data_ptr() for param in world.params]
    said = []
    for param, storage in zip(world.params[:SHOWN], storages, strict=False):
        shared = param.numel() > 0 and storages.count(storage) > 1
        said.append(f"{str(param.dtype)[6:]} {tuple(param.shape)}{_strides(param)}")
        said[-1] += ", in a common buffer" if shared else ""
    more = len(world.params) - SHOWN
    return "params " + "; ".join(said) + (f"; {more} more" if more > 0 else "")


def _strides(param: Tensor) -> str:
    return "" if param.is_contiguous() else f" with strides {param.stride()}"


def _settings(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={_plain(value)}" for name, value in values.items())


def _plain(value: object) -> str:
    if isinstance(value, Tensor):
        return (
            f"tensor of {value.item()!r}" if value.numel() == 1 else f"tensor {tuple(value.shape)}"
        )
    if any(map(callable, getattr(value, "__dict__", {}).values())):
        return f"object with {', '.join(vars(value))}"
    return str(value)[6:] if isinstance(value, torch.dtype) else repr(value)
