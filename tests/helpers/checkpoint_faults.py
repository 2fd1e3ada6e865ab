"""Ways in which a saved state does not fit, by name: each takes a good one and gives a bad one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch

State = dict[str, Any]
Fault = Callable[[State], object]
MASTERS = {
    "flat": "fp32_groups_flat",
    "unfused": "fp32_groups",
    "lamb": "fp32_groups",
    "bf16": "single_partition_of_fp32_groups",
}
INNER = {"bf16": "base_optimizer_state"}


def put(key: str, value: object) -> Fault:
    return lambda state: {**state, key: value}


def without(key: str) -> Fault:
    return lambda state: {name: value for name, value in state.items() if name != key}


def faults(kind: str) -> dict[str, Fault]:
    """Every fault of one kind of state."""
    found: dict[str, Fault] = {
        "list": lambda state: [state],
        "nothing": lambda _: {},
        "foreign": lambda _: {"weights": torch.ones(2)},
        "clip nan": put("clip_grad", math.nan),
        "clip text": put("clip_grad", "much"),
        "clip flag": put("clip_grad", True),
        "clip tensor": put("clip_grad", torch.ones(30, 30)),
    }
    found |= _owners(kind) | _masters(kind) | _inner(INNER.get(kind, "optimizer_state_dict"))
    return found | (_split(MASTERS[kind]) if kind == "bf16" else _scale())


def _owners(kind: str) -> dict[str, Fault]:
    """Files of others."""
    masters, inner = MASTERS[kind], INNER.get(kind, "optimizer_state_dict")
    zero = {"loss_scaler", "zero_stage", "base_optimizer_state", "single_partition_of_fp32_groups"}
    found: dict[str, Fault] = {
        "engine": lambda state: {"module": {}, "optimizer": state, "ds_version": "0.19.8"},
        "shard": lambda state: {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "1"},
        "zero": lambda state: {**state, **{key: 1 for key in zero if key not in state}},
    }
    if kind != "bf16":
        # What they share fits; what is their own does not.
        found["zero"] = lambda state: {**{key: 1 for key in zero}, "ds_version": "0.19.8"}
        found["split"] = lambda state: {**without(masters)(state), MASTERS["bf16"]: [1]}  # type: ignore[dict-item]
    for other, key in MASTERS.items():
        if key != masters:
            found[f"of {other}"] = _renamed(masters, key)
    found[f"no {masters}"] = without(masters)
    found[f"no {inner}"] = without(inner)
    return found


def _renamed(old: str, new: str) -> Fault:
    return lambda state: {new if key == old else key: value for key, value in state.items()}


def _masters(kind: str) -> dict[str, Fault]:
    key = MASTERS[kind]

    def first(change: Callable[[torch.Tensor], object]) -> Fault:
        def changed(state: State) -> object:
            rows = copy.deepcopy(state[key])
            if isinstance(rows[0], list):
                rows[0][0] = change(rows[0][0])
            else:
                rows[0] = change(rows[0])
            return {**state, key: rows}

        return changed

    found: dict[str, Fault] = {
        "masters none": put(key, None),
        "masters number": put(key, 3),
        "masters fewer": lambda state: {**state, key: state[key][:1]},
        "masters more": lambda state: {**state, key: [*state[key], state[key][0]]},
        "masters numbers": lambda state: {**state, key: [1.0 for _ in state[key]]},
        "masters longer": first(lambda t: torch.cat([t.flatten(), t.flatten()])),
        "masters shorter": first(lambda t: t.flatten()[:-1]),
        "masters half": first(lambda t: t.half()),
        "masters double": first(lambda t: t.double()),
        "masters whole": first(lambda t: t.int()),
        "masters sparse": first(lambda t: t.to_sparse()),
        "masters nowhere": first(lambda t: t.to("meta")),
        "masters shape": first(lambda t: t.reshape(-1, 1)),
    }
    return found


def _inner(key: str) -> dict[str, Fault]:
    def inside(change: Callable[[State], object]) -> Fault:
        def changed(state: State) -> object:
            inner = copy.deepcopy(state[key])
            return {**state, key: change(inner) or inner}

        return changed

    def entry(name: str, value: object) -> Fault:
        def change(inner: State) -> None:
            # The first master may be empty, and the last one never is.
            last = max(inner["state"])
            inner["state"][last][name] = value(inner["state"][last][name])  # type: ignore[operator]

        return inside(change)

    def option(name: str, value: object) -> Fault:
        return inside(lambda inner: inner["param_groups"][-1].__setitem__(name, value))

    def lacking(inner: State) -> None:
        del inner["state"][max(inner["state"])]["exp_avg_sq"]

    def momentum(inner: State) -> None:
        for number, held in inner["state"].items():
            inner["state"][number] = {"momentum_buffer": held["exp_avg"]}

    found: dict[str, Fault] = {
        "inner number": put(key, 3),
        "inner empty": put(key, {}),
        "inner lists": put(key, {"state": [], "param_groups": {}}),
        "inner groups": inside(lambda inner: inner["param_groups"].pop() and None),
        "inner sizes": inside(lambda inner: inner["param_groups"][0]["params"].append(9)),
        "inner twice": inside(
            lambda inner: inner["param_groups"][-1].__setitem__(
                "params", [0] * len(inner["param_groups"][-1]["params"])
            )
        ),
        "inner stranger": inside(lambda inner: inner["state"].__setitem__(99, {})),
        "inner names": inside(lambda inner: inner["state"].__setitem__("weight", {})),
        "inner state": inside(lambda inner: inner["state"].__setitem__(0, 3)),
        "inner sgd": inside(momentum),
        "inner lacking": inside(lacking),
        "options of sgd": inside(lambda inner: inner["param_groups"][0].pop("betas") and None),
        "amsgrad": option("amsgrad", True),
        "maximize": option("maximize", True),
        "lr nan": option("lr", math.nan),
        "lr text": option("lr", "fast"),
        "lr tensor": option("lr", torch.ones(30, 30)),
        "betas three": option("betas", (0.9, 0.9, 0.9)),
        "eps negative": option("eps", -1.0),
        "moment list": entry("exp_avg", lambda t: t.tolist()),
        "moment shape": entry("exp_avg", lambda t: t.reshape(-1, 1)),
        "moment short": entry("exp_avg_sq", lambda t: t.flatten()[:-1]),
        "moment half": entry("exp_avg", lambda t: t.half()),
        "moment whole": entry("exp_avg", lambda t: t.int()),
        "moment nowhere": entry("exp_avg", lambda t: t.to("meta")),
        "moment sparse": entry("exp_avg_sq", lambda t: t.to_sparse()),
    }
    steps = (math.nan, math.inf, -1, 1.5, "3", 2**70, torch.ones(30, 30), None, True)
    return found | {f"step {str(bad)[:9]}": entry("step", lambda _, bad=bad: bad) for bad in steps}


def _scale() -> dict[str, Fault]:
    found: dict[str, Fault] = {
        "static": put("dynamic_loss_scale", False),
        "rule text": put("dynamic_loss_scale", "yes"),
    }
    for key in ("dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter"):
        found[f"no {key}"] = without(key)
    scales = (math.nan, -1.0, -math.inf, "16", None, True, 10**400)
    found |= {f"scale {str(bad)[:9]}": put("cur_scale", bad) for bad in scales}
    counts = (math.nan, 1.5, -3, 2**63, 10**400, "1" * 900, torch.ones(30, 30), None, True)
    for key in ("cur_iter", "last_overflow_iter"):
        found |= {f"{key} {str(bad)[:9]}": put(key, bad) for bad in counts}
    return found


def _split(masters: str) -> dict[str, Fault]:
    return {
        "no version": without("ds_version"),
        "empty version": put("ds_version", ""),
        "other ranks": put("partition_count", [2, 2]),
        "count": put("partition_count", 1),
        "other rank": put("partition_rank", [0, 1]),
        "places": put("param_slice_mappings", [{"p0": {"numel": 6, "start": 1}}, {}]),
        "places list": put("param_slice_mappings", 3),
        "places fewer": put("param_slice_mappings", []),
    }
