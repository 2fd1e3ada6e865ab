"""Shards of DeepSpeed's ZeRO 1 and 2, as entries by parameter.

A shard is the file of one rank, or the `optimizer_state_dict` in it:

    optimizer_state_dict
      single_partition_of_fp32_groups   by group, this rank's masters without padding at the end
      base_optimizer_state              rigid: the dict of the inner optimizer, padded; elastic: by
                                        group, its state without padding, and no options
      group_paddings, partition_count   by group
      param_alignment_paddings          by group, zeros behind each parameter, in the order they lie
      param_slice_mappings              by group and name, places in the master; with round robin
                                        those that parameters would have without it
      zero_stage, clip_grad, loss_scaler, ds_version
    ds_config                           with `round_robin_gradients`; an `optimizer_state_dict` by
                                        itself is taken to have the order of who loads it

A shard has no shapes. Those of the optimizer that loads are taken, and held against the names, the
places and the lengths that shards have. Places in the list are ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from twinstep.contract.checkpoint.entries import PARTITIONS, require_keys
from twinstep.contract.errors import in_words
from twinstep.contract.fragments import Partition, fragments_of
from twinstep.contract.loss_scale import Saved
from twinstep.contract.moments import StateDict
from twinstep.contract.tensors import check_in_memory

WHOLE, INNER = "optimizer_state_dict", "base_optimizer_state"
PLACES = "param_slice_mappings"
OWN = ("zero_stage", PARTITIONS, "ds_version")
KEYS = (*OWN, INNER, "loss_scaler", "partition_count")
COUNTERS = ("cur_iter", "last_overflow_iter", "cur_hysteresis")
WHERE = "ZeroOptimizer.load_state_dict"
PADDING = ""  # the name of zeros between parameters


class Ordered(Partition, Protocol):
    """A partition that knows in which order its parameters were given."""

    @property
    def original(self) -> list[Tensor]:
        """The trained parameters in the order of the group."""


class Shard(NamedTuple):
    """A shard, and what the file around it says.

    Attributes:
        rank: whose it is.
        state: its `optimizer_state_dict`.
        dealt: parameters lie in round-robin order.
    """

    rank: int
    state: Mapping[str, object]
    dealt: bool

    @property
    def where(self) -> str:
        """Words for messages."""
        return f"entry {self.rank}, {WHERE}"

    def by_group(
        self, key: str, count: int, within: Mapping[str, object] | None = None
    ) -> list[object]:
        """A list with a value for each group.

        Raises:
            ValueError: it is none.
        """
        found = (self.state if within is None else within).get(key)
        if not isinstance(found, list | tuple) or len(found) != count:
            raise ValueError(f"{key} should be a list of {count}, but is not [{self.where}]")
        return list(found)


def is_shard(entry: object) -> bool:
    """True if an entry seems to be one of DeepSpeed's ZeRO."""
    state = entry.get(WHOLE, entry) if isinstance(entry, Mapping) else None
    return isinstance(state, Mapping) and all(key in state for key in OWN)


def by_parameter(
    groups: Sequence[Ordered],
    optimizer: torch.optim.Optimizer,
    entries: Sequence[object],
    *,
    dealt: bool,
) -> list[StateDict | None]:
    """Entries by parameter of shards, without their format.

    Args:
        groups: as they are now.
        optimizer: the inner one; elastic shards have no options, and its own stay.
        entries: of all ranks that saved, in their order; None where one is not there.
        dealt: order of parameters where shards do not have it.

    Raises:
        ValueError: a shard is foreign, cut, of another rank, another model or another save.
    """
    if any(group.expert is not None for group in groups):
        raise ValueError(
            "entries are DeepSpeed's, but should be ours: their experts are split over ranks that "
            f"no entry names [{WHERE}]"
        )
    shards = [
        None if entry is None else _shard(entry, rank, dealt) for rank, entry in enumerate(entries)
    ]
    world = len(entries)
    for shard in shards:
        if shard is None:
            continue
        counts = shard.by_group("partition_count", len(groups))
        if counts != [world] * len(groups):
            raise ValueError(
                f"partition_count={in_words(counts)}, but should be {[world] * len(groups)}: one "
                f"entry for each rank that saved, None where it is not there [{shard.where}]"
            )
    return [None if shard is None else _entry(groups, optimizer, shard, world) for shard in shards]


def _shard(entry: object, rank: int, dealt: bool) -> Shard:
    where = f"entry {rank}, {WHERE}"
    if not is_shard(entry):
        raise ValueError(f"state is none of DeepSpeed's ZeRO, but other entries are [{where}]")
    whole = cast(Mapping[str, object], entry)
    state = require_keys(whole.get(WHOLE, whole), KEYS, where)
    config = whole.get("ds_config")
    if isinstance(config, Mapping):
        zero = config.get("zero_optimization")
        dealt = isinstance(zero, Mapping) and zero.get("round_robin_gradients") is True
    return Shard(rank, state, dealt)


def _entry(
    groups: Sequence[Ordered], optimizer: torch.optim.Optimizer, shard: Shard, world: int
) -> StateDict:
    """The entry of one rank."""
    count = len(groups)
    masters = shard.by_group(PARTITIONS, count)
    states, options = _inner(optimizer, shard, count)
    # Older versions have none.
    places = shard.by_group(PLACES, count, {PLACES: [None] * count, **shard.state})
    rows = []
    for number, group in enumerate(groups):
        lying = _lying(group, shard, number, count, world)
        _check_places(group, lying, places[number], shard, world)
        rows += _rows(lying, masters[number], states[number], shard, world, number)
    return {
        "zero_stage": int(cast(int, shard.state["zero_stage"])),
        "clip_grad": shard.state.get("clip_grad", 0.0),
        "loss_scaler": _scale(shard),
        "param_groups": options,
        "fragments": rows,
    }


def _lying(
    group: Ordered, shard: Shard, number: int, count: int, world: int
) -> list[tuple[str, int]]:
    """Names and sizes in the order in which they lie, padding between them included."""
    names = dict(zip(group.params, group.names, strict=True))
    given = [(names[param], param.numel()) for param in group.original]
    if shard.dealt:
        given = [given[at] for first in range(world) for at in range(first, len(given), world)]
    padded: object = [0] * len(given)
    if "param_alignment_paddings" in shard.state:
        padded = shard.by_group("param_alignment_paddings", count)[number]
    if (
        not isinstance(padded, list)
        or len(padded) != len(given)
        or not all(isinstance(zeros, int) and zeros >= 0 for zeros in padded)
    ):
        raise ValueError(
            f"param_alignment_paddings has {in_words(padded)}, but should have {len(given)} whole "
            f"numbers [group {number}, {shard.where}]"
        )
    pairs = zip(given, padded, strict=True)
    return [each for row, zeros in pairs for each in (row, (PADDING, zeros))]


def _check_places(
    group: Ordered, lying: Sequence[tuple[str, int]], found: object, shard: Shard, world: int
) -> None:
    """Require names and places that this model has on that rank."""
    if not isinstance(found, Mapping):
        return
    sizes = list(lying)
    if shard.dealt and not any(size for name, size in lying if name == PADDING):
        # DeepSpeed's places are then those that parameters would have in the order of the group.
        names = dict(zip(group.params, group.names, strict=True))
        sizes = [(names[param], param.numel()) for param in group.original]
    size = _partition_size(sizes, world)
    begin = shard.rank * size
    wanted = fragments_of(sizes, range(begin, begin + size))
    wanted.pop(PADDING, None)
    own = {name: (at.in_partition.numel, at.in_partition.start) for name, at in wanted.items()}
    held = {
        name: (getattr(at, "numel", None), getattr(at, "start", None)) for name, at in found.items()
    }
    for name in sorted({*own, *map(str, held)}):
        if own.get(name) != held.get(name):
            raise ValueError(
                f"{name} has (elements, first place) {held.get(name)}, but should have "
                f"{own.get(name)} in the shard of rank {shard.rank} of {world} [{shard.where}]"
            )


def _partition_size(lying: Sequence[tuple[str, int]], world: int) -> int:
    alignment = 2 * world
    return -(-sum(size for _, size in lying) // alignment) * 2


def _inner(
    optimizer: torch.optim.Optimizer, shard: Shard, count: int
) -> tuple[list[StateDict], list[StateDict]]:
    """State and options of the inner optimizer, by group."""
    found = shard.state[INNER]
    if isinstance(found, Mapping):
        given = shard.by_group("param_groups", count, found)
        table = found.get("state")
        if not isinstance(table, Mapping) or not all(_is_group(group) for group in given):
            raise ValueError(
                f"{INNER} should be the state dict of an optimizer, but is not [{shard.where}]"
            )
        rows = [cast(StateDict, group) for group in given]
        states = [table.get(cast("list[int]", row["params"])[0], {}) for row in rows]
        steps = [row.get("step") for row in rows]
    else:
        states = shard.by_group(INNER, count)
        rows = [dict(row) for row in optimizer.state_dict()["param_groups"]]
        steps = [shard.state.get("base_optimizer_state_step")] * count
    if not all(isinstance(state, Mapping) for state in states):
        raise ValueError(f"{INNER} should have a dict for each group, but has not [{shard.where}]")
    whole = []
    for state, step in zip(cast("list[Mapping[str, object]]", states), steps, strict=True):
        # Some of DeepSpeed's optimizers count in their groups alone.
        counted = {"step": step} if state and step is not None else {}
        whole.append({**counted, **state})
    plain = [{k: v for k, v in row.items() if k not in ("params", "step")} for row in rows]
    return whole, plain


def _is_group(group: object) -> bool:
    params = group.get("params") if isinstance(group, Mapping) else None
    return isinstance(params, list) and len(params) == 1


def _rows(
    lying: Sequence[tuple[str, int]],
    master: object,
    state: StateDict,
    shard: Shard,
    world: int,
    number: int,
) -> list[StateDict]:
    """Rows of the parameters that lie in a shard."""
    size = _partition_size(lying, world)
    begin = shard.rank * size
    own = min(size, max(0, sum(numel for _, numel in lying) - begin))
    where = f"group {number}, {shard.where}"
    fp32 = _own_part(master, PARTITIONS, own, size, where)
    cut = {
        key: _own_part(value, key, own, size, where)
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim()
    }
    rest = {key: value for key, value in state.items() if key not in cut}
    starts = accumulate((numel for _, numel in lying), initial=0)
    places = [
        (name, numel, start, range(max(start, begin), min(start + numel, begin + size)))
        for (name, numel), start in zip(lying, starts, strict=False)
        if name != PADDING
    ]
    # A row of no elements has the names of the states where no parameter lies here.
    nothing = [(name, numel, begin, range(begin, begin)) for name, numel, *_ in places[:1]]
    rows = []
    for name, numel, start, inside in [row for row in places if len(row[3])] or nothing:
        part = slice(inside.start - begin, inside.stop - begin)
        rows.append(
            {
                "name": name,
                "start": inside.start - start,
                "numel": len(inside),
                "whole": numel,
                "expert": None,
                "fp32": fp32[part],
                "state": {key: value[part] for key, value in cut.items()},
                "counters": rest,
            }
        )
    return rows


def _own_part(value: object, key: str, own: int, size: int, where: str) -> Tensor:
    """A partition without the padding at its end, which it may have or not."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{key} should be a tensor, but is not [{where}]")
    check_in_memory(value, key, where)
    if value.dtype != torch.float32:
        raise ValueError(f"{key} is {value.dtype}, but should be torch.float32 [{where}]")
    if value.dim() != 1 or not own <= value.numel() <= size:
        most = f" to {size}" if size > own else ""
        raise ValueError(
            f"{key} has shape {tuple(value.shape)}, but should have {own}{most} elements: those of "
            f"this model on that rank [{where}]"
        )
    return value.detach()[:own]


def _scale(shard: Shard) -> Saved:
    """State of the loss scale, from an object of DeepSpeed's that was read as values."""
    held = getattr(shard.state["loss_scaler"], "__dict__", {})
    dynamic, scale = held.get("dynamic"), held.get("cur_scale")
    if not isinstance(dynamic, bool) or not isinstance(scale, int | float):
        raise ValueError(f"loss_scaler should be one of DeepSpeed's, but is not [{shard.where}]")
    counters = {key: held[key] for key in COUNTERS if key in held}
    return {"dynamic_loss_scale": dynamic, "cur_scale": float(scale), **counters}
