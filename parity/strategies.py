"""What Hypothesis draws: recipes. Small to draw and to mutate; `expand` makes the tensors."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from parity.case import Recipe
from parity.laws.base import Draw
from parity.operation import Operation

BOUNDARIES = (
    (1, 2, 3, 4, 5, 7, 8, 9),
    (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129),
    (255, 256, 257, 511, 512, 513, 1021, 1023, 1024, 1025),
)
LARGE = (2047, 2049, 4095, 4096, 4097, 4099)


def sizes(draw: Draw, layout: str) -> SearchStrategy[tuple[int, ...]]:
    """Elements per tensor: boundaries, primes, many tiny ones, empties anywhere."""
    small = st.sampled_from((5, 1, 2, 3, 4, 7, 8, 17, 33, 130))
    one = small if draw.sizes == "small" else _size()
    if layout == "flat":
        return one.map(lambda size: (size,))
    smallest = 1 if draw.full else 0
    several = st.lists(one, min_size=max(smallest, 2), max_size=5).map(tuple)
    if draw.sizes == "small":
        return several
    with_empties = st.lists(st.sampled_from((3, 0, 1, 33, 0)), min_size=smallest, max_size=7).map(
        lambda row: (*row, 5) if draw.full and not any(row) else tuple(row)
    )
    if draw.sizes == "pairs":
        several = several.map(lambda row: (*row, *row[:2]))
    many_tiny = st.integers(9, 40).map(lambda count: (1, 2, 3) * (count // 3))
    return st.one_of(several, several, several, with_empties, many_tiny)


def _size() -> SearchStrategy[int]:
    tiny, middle, blocks = (st.sampled_from(row) for row in BOUNDARIES)
    return st.one_of(tiny, middle, blocks, st.integers(1, 300), st.sampled_from(LARGE))


def controls(operation: Operation) -> SearchStrategy[dict[str, float]]:
    """A value for each control; no customary default is among them."""
    return st.fixed_dictionaries(
        {control.name: st.sampled_from(control.values) for control in operation.controls}
    )


def recipes(operation: Operation, draw: Draw, layouts: tuple[str, ...]) -> SearchStrategy[Recipe]:
    """Recipes for cases of an operation in one of the layouts."""
    options = st.fixed_dictionaries(
        {option.name: st.sampled_from(option.choices) for option in operation.options}
    )
    if not operation.lists:
        return st.builds(
            Recipe,
            layout=st.just("list"),
            sizes=st.just(()),
            controls=controls(operation),
            options=options,
        )

    def in_layout(layout: str) -> SearchStrategy[Recipe]:
        return st.builds(
            Recipe,
            layout=st.just(layout),
            sizes=sizes(draw, layout),
            seed=st.integers(0, 2**32 - 1),
            bits=st.one_of(st.just(()), st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple)),
            controls=controls(operation),
            options=options,
            aligned=st.booleans(),
            planes=st.booleans(),
            absent=st.sampled_from((False, False, True)),
            guard=st.sampled_from(draw.guards),
            one_step=st.just(draw.one_step),
        )

    return st.sampled_from(layouts).flatmap(in_layout)
