"""Models over ranks: parameters that are shared, split or experts, and groups of their ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

from torch.nn import Parameter

from twinstep.contract.parallel import RANK_GETTERS
from twinstep.parity.sequences.fills import DTYPES, Dice, filled
from twinstep.parity.sequences.fp16_rules import mark
from twinstep.parity.sequences.over_ranks.place import EXPERT, OWN_EXPERT, REPLICAS, DrawnRank
from twinstep.parity.sequences.parts import SHAPES, Group

# Groups that a wrapper is given besides those that its world needs: of experts, or of copies alone.
GIVEN = ("", "experts", "copies")
EXPERTS = GIVEN[1:]
Marks = Mapping[str, object]
SHARED: Sequence[Marks] = ({}, {}, {"model_parallel": True}, {"tensor_model_parallel": True})
REPLICA: Marks = {"ds_pipe_replicated": True}
# More are seldom worth their time on eight ranks.
COUNTS = (1, 2, 3)
SMALL_SHAPES = tuple(shape for shape in SHAPES if shape != (700,))


def marks_of(dice: Dice, expert: str) -> Marks:
    """Marks of a parameter, of an expert if it has a name."""
    if not expert:
        return dice.pick((*SHARED, *SHARED, REPLICA))
    # An expert of one rank alone is split along every axis.
    split = {"model_parallel": True} if expert == OWN_EXPERT else dice.pick(SHARED)
    return {"allreduce": False, "group_name": expert, **split}


def names_of_experts(place: DrawnRank) -> tuple[str, ...]:
    """Names of the experts that a world may have."""
    return (EXPERT, OWN_EXPERT) if place.sizes["expert"] > 1 else (EXPERT,)


def parameters_over(
    dice: Dice,
    dtype: str,
    device: str,
    seed: int,
    place: DrawnRank,
    experts: Sequence[str],
    *,
    tiny: bool = False,
    counts: Sequence[int] = COUNTS,
) -> list[Parameter]:
    """Parameters of a group: pieces that this rank holds; `mixed` takes each dtype in turn.

    What is drawn is the same on all ranks; the size of a piece may depend on its number.

    Args:
        dice: draws.
        dtype: of the parameters.
        device: of them.
        seed: of their values.
        place: this rank.
        experts: names to draw from, "" for a parameter that is no expert's.
        tiny: of three elements at most, so that some ranks get padding alone.
        counts: numbers of parameters to draw from.
    """
    turns = list(DTYPES.values()) if dtype == "mixed" else [DTYPES[dtype]]
    shapes = SMALL_SHAPES[:2] if tiny else SMALL_SHAPES
    found: list[Parameter] = []
    for index in range(dice.pick(counts)):
        own, marks = turns[index % len(turns)], marks_of(dice, dice.pick(experts))
        first, step = dice.pick(range(len(shapes))), dice.pick((0, 0, 0, 1))
        param = Parameter(filled((1,), own, "ordinary", 0))
        mark(param, marks)
        shape = shapes[(first + step * place.piece(param)) % len(shapes)]
        plain = seed + index if seed else 0
        values = place.seed_of(param, plain, False) if plain else 0
        param.data = filled(shape, own, "ordinary", values).to(device)
        found.append(param)
    return found


def groups_over(
    dice: Dice,
    dtypes: Sequence[str],
    device: str,
    seed: int,
    place: DrawnRank,
    experts: bool,
    *,
    hyper: Callable[[Dice], Group],
    tiny: bool = False,
    counts: Sequence[int] = COUNTS,
) -> list[Group]:
    """Groups of shared parameters, then of experts if there are any, which are marked.

    Args:
        dice: draws.
        dtypes: of each group.
        device: of the parameters.
        seed: of their values.
        place: this rank.
        experts: there are some; the last group is theirs.
        hyper: hyper-parameters of a group.
        tiny: see `parameters_over`.
        counts: see there.
    """
    groups, last = list[Group](), len(dtypes) - 1
    for number, dtype in enumerate(dtypes):
        name = dice.pick(("", *names_of_experts(place))) if experts and number else ""
        if experts and number == last:
            name = dice.pick(names_of_experts(place))
        row = parameters_over(
            dice, dtype, device, seed + 10 * number, place, (name,), tiny=tiny, counts=counts
        )
        marks = {"moe": True, "name": name} if name else {}
        groups.append({"params": row, **hyper(dice), **marks})
    return groups


def unit_of(place: DrawnRank, getter: str) -> SimpleNamespace:
    """A model-parallel unit, as megatron has one.

    Args:
        place: this rank.
        getter: method that gives the place among tensor-parallel ranks.
    """
    return SimpleNamespace(
        **{
            "get_model_parallel_group": lambda: place.group("tensor"),
            "get_data_parallel_group": lambda: place.group(*REPLICAS),
            getter: lambda: place.at["tensor"],
        }
    )


def expert_arguments(dice: Dice, place: DrawnRank, given: str) -> dict[str, object]:
    """Expert groups by name; ranks may list them in any order.

    Experts that are not split may have copies alone.
    """
    copied = given == "copies" and place.sizes["expert"] == 1
    split = {} if copied else {EXPERT: place.group("expert")}
    if OWN_EXPERT in names_of_experts(place):
        split[OWN_EXPERT] = place.group(*REPLICAS)
    copies = {EXPERT: place.group("data")}
    turned = dice.pick((False, True, True, True)) and place.number % 2
    listed = dict(reversed(split.items())) if turned else split
    return {"expert_groups": listed, "expert_data_groups": copies}


def has_experts(place: DrawnRank, given: str) -> bool:
    """True if a world has experts."""
    return given in EXPERTS or place.sizes["expert"] > 1


def group_arguments(dice: Dice, place: DrawnRank, given: str) -> dict[str, object]:
    """Arguments that hand a constructor its process groups, of a unit and of experts.

    Args:
        dice: draws the same on all ranks.
        place: this rank.
        given: one of GIVEN.
    """
    getter = dice.pick(RANK_GETTERS)
    unit = dice.pick((False, True)) or place.sizes["tensor"] > 1
    named = expert_arguments(dice, place, given) if has_experts(place, given) else {}
    return {**({"mpu": unit_of(place, getter)} if unit else {}), **named}
