"""State dicts of `ZeroOptimizer`: addressed by parameter, so that any number of ranks can load.

    format                            FORMAT
    zero_stage                        1 or 2
    clip_grad                         largest norm
    loss_scaler                       dict of the loss scale; empty where the loss has none
    param_groups                      options of the inner optimizer's groups
    fragments                         a row for each part of a parameter that lies on this rank

A row has `name`, `start` and `numel` (a part of the flattened parameter), `whole` (elements of the
parameter), `fp32` (the master), `state` (by name, what is shaped like the master), `counters` (by
name, the rest) and, for an expert, `expert` [name, rank and number of ranks in its expert-parallel
group]. There is no padding, and no order of parameters. Where no parameter of a group lies on the
rank, a row of no elements has the names of its states, so that a rank alone can restore them. A
loader takes from all rows what lies on its own rank; entries that it does not need may be missing.
Shards of DeepSpeed's ZeRO are taken for such entries (`deepspeed_zero`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar, cast

import torch
from torch import Tensor

from twinstep.contract.agreement import on_all_ranks
from twinstep.contract.checkpoint.deepspeed_zero import Ordered, by_parameter, is_shard
from twinstep.contract.checkpoint.entries import (
    SAME,
    Loaded,
    clip_norm,
    copied,
    copy_of,
    require_keys,
)
from twinstep.contract.checkpoint.inner import inner_state
from twinstep.contract.errors import in_words
from twinstep.contract.fragments import Fragment, FragmentAddress, Partition
from twinstep.contract.loss_scale import Saved
from twinstep.contract.moments import StateDict
from twinstep.contract.parallel import Groups
from twinstep.contract.tensors import check_in_memory

FORMAT = "twinstep ZeRO, by parameter, 1"
WHERE = "ZeroOptimizer.load_state_dict"
KEYS = ("format", "zero_stage", "loss_scaler", "param_groups", "fragments")
COLUMNS = ("name", "start", "numel", "whole", "expert", "fp32", "state", "counters")
NOTHING = Fragment(in_param=FragmentAddress(0, 0), in_partition=FragmentAddress(0, 0))
Row = Mapping[str, object]
# Name, rank and number of ranks of the expert-parallel group; None of what is shared.
Expert = list[object] | None
Scale = TypeVar("Scale")


def saved(
    groups: Sequence[Partition],
    optimizer: torch.optim.Optimizer,
    experts: Sequence[Expert],
    *,
    stage: int,
    clip_grad: float,
    scale: Saved,
    cpu_offload: bool,
) -> StateDict:
    """The entry of this rank; copies, not views.

    Args:
        groups: as laid out.
        optimizer: the inner one.
        experts: by group.
        stage: 1 or 2.
        clip_grad: largest norm.
        scale: the dict of the scaler; empty where the loss is not scaled.
        cpu_offload: copy to the CPU.

    Raises:
        ValueError: the inner optimizer has state that cannot be cut.
    """
    # A rate may be a tensor, which goes on changing.
    options = copied(optimizer.state_dict()["param_groups"], cpu_offload)
    return {
        "format": FORMAT,
        "zero_stage": stage,
        "clip_grad": clip_grad,
        "loss_scaler": dict(scale),
        "param_groups": [
            {key: value for key, value in group.items() if key != "params"} for group in options
        ],
        "fragments": [
            row
            for group, expert in zip(groups, experts, strict=True)
            for row in _rows(group, optimizer.state.get(group.master, {}), expert, cpu_offload)
        ],
    }


def _rows(
    group: Partition, state: Mapping[str, object], expert: Expert, cpu_offload: bool
) -> list[StateDict]:
    shape = group.master.shape
    cut = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.shape == shape}
    rest = {key: value for key, value in state.items() if key not in cut}
    for key, value in rest.items():
        if isinstance(value, Tensor) and value.dim():
            raise ValueError(
                f"state {key} has shape {tuple(value.shape)}, but should have {tuple(shape)} like "
                "its master to be saved by parameter [ZeroOptimizer.state_dict]"
            )
    fragments = group.fragments or dict.fromkeys(group.names[:1], NOTHING)
    rows: list[StateDict] = []
    for name, param in zip(group.names, group.params, strict=True):
        if name not in fragments:
            continue
        fragment = fragments[name]
        rows.append(
            {
                "name": name,
                "start": fragment.in_param.start,
                "numel": fragment.in_param.numel,
                "whole": param.numel(),
                "expert": expert,
                "fp32": _part(group.master, fragment, cpu_offload),
                "state": {key: _part(value, fragment, cpu_offload) for key, value in cut.items()},
                "counters": {
                    key: copy_of(value, cpu_offload) if isinstance(value, Tensor) else value
                    for key, value in rest.items()
                },
            }
        )
    return rows


def _part(tensor: Tensor, fragment: Fragment, cpu_offload: bool) -> Tensor:
    place = fragment.in_partition
    return copy_of(tensor.narrow(0, place.start, place.numel), cpu_offload)


def checked(
    groups: Sequence[Ordered],
    optimizer: torch.optim.Optimizer,
    experts: Sequence[Expert],
    entries: object,
    ranks: Groups,
    *,
    restored: Callable[[Mapping[str, object]], Scale] | None,
    states: bool,
    rigid: bool,
    dealt: bool,
) -> tuple[Loaded, Scale | None]:
    """Contents that this rank takes from the entries of ranks that saved, and the loss scale.

    Args:
        groups: as they are now.
        optimizer: the inner one; not changed.
        experts: by group.
        entries: of the data-parallel ranks that saved, in any order; None where one is not there.
        ranks: groups of all ranks that load.
        restored: checks and returns the state of the loss scale; None if the loss has none.
        states: the state of the inner optimizer is asked for, too.
        rigid: take entries of as many ranks as there are now, and no others.
        dealt: order of parameters in shards of DeepSpeed's that do not have it.

    Raises:
        ValueError: something does not fit, here or on another rank, or ranks would load states of
            different steps, clip norms or scales.
    """
    scales: list[float] = []

    def read() -> tuple[Loaded, Scale | None]:
        given = _checked_entries(_ours(groups, optimizer, entries, rigid, dealt))
        saved = cast(Saved, given[0]["loss_scaler"])
        scaling = None if restored is None else restored(saved)
        scales.append(float(saved.get("cur_scale", 1.0)))
        return _read(groups, optimizer, experts, given, states), scaling

    def scale(_: object) -> float | None:
        return None if restored is None else scales[-1]

    same = {name: partial(_of_loaded, number) for name, number in SAME.items()}
    device = groups[0].flat.device
    return on_all_ranks(read, ranks, device, same={**same, "loss scale": scale})


def _of_loaded(
    number: Callable[[Loaded], float | None], found: tuple[Loaded, object]
) -> float | None:
    return number(found[0])


def _ours(
    groups: Sequence[Ordered],
    optimizer: torch.optim.Optimizer,
    entries: object,
    rigid: bool,
    dealt: bool,
) -> Sequence[object]:
    """Entries in this format, as far as they are of a known one."""
    if not isinstance(entries, list | tuple) or all(entry is None for entry in entries):
        raise ValueError(f"states should be a list with one entry per rank, but are not [{WHERE}]")
    world = max(group.world for group in groups)
    if rigid and len(entries) != world:
        raise ValueError(
            f"{len(entries)} entries were given, but should be {world}, one for each rank, with "
            f"elastic_checkpoint=False [{WHERE}]"
        )
    if not any(is_shard(entry) for entry in entries):
        return entries
    found = by_parameter(groups, optimizer, entries, dealt=dealt)
    return [None if entry is None else {"format": FORMAT, **entry} for entry in found]


def _checked_entries(entries: Sequence[object]) -> list[StateDict]:
    """Entries that are there: of this format, and of one save."""
    given = []
    for index, entry in enumerate(entries):
        if entry is not None:
            found = dict(require_keys(entry, KEYS, f"entry {index}, {WHERE}"))
            if found["format"] != FORMAT:
                raise ValueError(
                    f"format={in_words(found['format'])}, but should be {FORMAT!r} [{WHERE}]"
                )
            given.append(found)
    for key in ("loss_scaler", "clip_grad", "zero_stage"):
        values = [entry.get(key) for entry in given]
        if any(value != values[0] for value in values):
            raise ValueError(f"entries have different {key}, but should be of one save [{WHERE}]")
    if not isinstance(given[0]["loss_scaler"], Mapping):
        raise ValueError(f"loss_scaler should be a dict, but is not [{WHERE}]")
    return given


def _read(
    groups: Sequence[Partition],
    optimizer: torch.optim.Optimizer,
    experts: Sequence[Expert],
    given: Sequence[StateDict],
    states: bool,
) -> Loaded:
    """What lies on this rank, and a dict for the inner optimizer."""
    by_name = _rows_by_name(given)
    own = {
        (name, repr(expert))
        for group, expert in zip(groups, experts, strict=True)
        for name in group.names
    }
    # Experts of other ranks are in the entries, too.
    strangers = [name for name, who in by_name if who == repr(None) and (name, who) not in own]
    if strangers:
        raise ValueError(
            f"entries have {', '.join(strangers[:3])}, but there is no such parameter [{WHERE}]"
        )
    masters, held = [], {}
    for number, (group, expert) in enumerate(zip(groups, experts, strict=True)):
        rows = {name: by_name.get((name, repr(expert)), []) for name in group.names}
        masters.append(_assembled(group, rows, lambda row: row["fp32"]))
        if states and (state := _state(group, rows)):
            held[number] = state
    inner = _inner(optimizer, given[0]["param_groups"], held) if states else None
    return Loaded(inner=inner, masters=masters, clip_grad=clip_norm(given[0], WHERE))


def _rows_by_name(given: Sequence[StateDict]) -> dict[tuple[str, str], list[Row]]:
    """Rows of all entries, by name and expert, in the order of their elements."""
    found: dict[tuple[str, str], list[Row]] = {}
    for entry in given:
        rows = entry["fragments"]
        if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
            raise ValueError(f"fragments should be a list of rows, but is not [{WHERE}]")
        for row in rows:
            _check_row(require_keys(row, COLUMNS, f"fragments, {WHERE}"))
            found.setdefault((str(row["name"]), repr(row["expert"])), []).append(row)
    return {(name, who): _in_order(name, rows) for (name, who), rows in found.items()}


def _in_order(name: str, rows: Sequence[Row]) -> list[Row]:
    """Rows of one parameter by their elements, each of which should be in one row."""
    ordered = sorted(rows, key=lambda row: (cast(int, row["start"]), cast(int, row["numel"])))
    reached = 0
    for row in ordered:
        start, numel = cast(int, row["start"]), cast(int, row["numel"])
        if start < reached:
            raise ValueError(
                f"{name} has element {start} twice, but entries should be of the ranks of one "
                f"data-parallel group [{WHERE}]"
            )
        reached = start + numel
    return ordered


def _check_row(row: Row) -> None:
    """Require numbers that are some, and 1-D tensors of as many elements as the row has."""
    name = row["name"]
    for key in ("start", "numel", "whole"):
        value = row[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(
                f"{key}={in_words(value)}, but should be a whole number [{name}, {WHERE}]"
            )
    state, counters = row["state"], row["counters"]
    if not isinstance(state, Mapping) or not isinstance(counters, Mapping):
        raise ValueError(f"state and counters should be dicts, but are not [{name}, {WHERE}]")
    for key, tensor in {"fp32": row["fp32"], **state}.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{key} of {name} should be a tensor, but is not [{WHERE}]")
        check_in_memory(tensor, f"{key} of {name}", WHERE)
        if tuple(tensor.shape) != (row["numel"],):
            raise ValueError(
                f"{key} of {name} has shape {tuple(tensor.shape)}, but should have "
                f"({row['numel']},) [{WHERE}]"
            )
    if cast(Tensor, row["fp32"]).dtype != torch.float32:
        raise ValueError(f"fp32 of {name} should be torch.float32, but is not [{WHERE}]")


def _assembled(
    group: Partition,
    rows: Mapping[str, Sequence[Row]],
    tensor_of: Callable[[Row], object],
) -> Tensor:
    """This rank's partition, put together from rows; zeros where no parameter lies."""
    flat = torch.zeros(group.partition_size, device=group.master.device)
    for name, param in zip(group.names, group.params, strict=True):
        if name not in group.fragments:
            continue
        wanted, place = group.fragments[name].in_param, group.fragments[name].in_partition
        end, found = wanted.start + wanted.numel, 0
        for row in rows[name]:
            first, stop = cast(int, row["start"]), cast(int, row["start"]) + cast(int, row["numel"])
            if row["whole"] != param.numel():
                raise ValueError(
                    f"{name} has {in_words(row['whole'])} elements, but should have "
                    f"{param.numel()} [{WHERE}]"
                )
            shared = range(max(first, wanted.start), min(stop, end))
            if len(shared):
                part = cast(Tensor, tensor_of(row)).detach()
                target = flat.narrow(0, place.start + shared.start - wanted.start, len(shared))
                target.copy_(part.narrow(0, shared.start - first, len(shared)))
                found += len(shared)
        if found < wanted.numel:
            raise ValueError(
                f"entries have {found} elements of {name} from {wanted.start} to {end - 1}, but "
                f"should have all: each rank that saved has some [{WHERE}]"
            )
    return flat


def _state(group: Partition, rows: Mapping[str, Sequence[Row]]) -> StateDict:
    """State of the inner optimizer for the master of this rank; empty before a first step."""
    every = [row for name in group.names for row in rows[name]]
    if not every:
        return {}
    names = [(tuple(cast(Row, row["state"])), tuple(cast(Row, row["counters"]))) for row in every]
    if any(found != names[0] for found in names):
        raise ValueError(
            f"parameters of one group have different states, but should have the same [{WHERE}]"
        )
    counters = cast(Row, every[0]["counters"])
    for key in counters:
        values = {_plain(cast(Row, row["counters"])[key]) for row in every}
        if len(values) > 1:
            raise ValueError(
                f"{key} is {', '.join(sorted(values))} in one group, but should be of one save "
                f"[{WHERE}]"
            )

    def cut(key: str) -> Tensor:
        return _assembled(group, rows, lambda row: cast(Row, row["state"])[key])

    return {**counters, **{key: cut(key) for key in cast(Row, every[0]["state"])}}


def _plain(value: object) -> str:
    return in_words(value.tolist() if isinstance(value, Tensor) and not value.is_meta else value)


def _inner(
    optimizer: torch.optim.Optimizer, options: object, held: Mapping[int, StateDict]
) -> StateDict:
    """A dict for the inner optimizer, whose groups have one master each."""
    if not isinstance(options, list) or not all(isinstance(row, Mapping) for row in options):
        raise ValueError(f"param_groups should be a list of dicts, but is not [{WHERE}]")
    groups = [{**row, "params": [number]} for number, row in enumerate(options)]
    whole = {"state": dict(held), "param_groups": groups}
    return inner_state(optimizer, whole, WHERE, key="fragments")
