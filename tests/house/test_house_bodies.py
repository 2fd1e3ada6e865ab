"""The two sides hold no arithmetic in common, and the comparison can say no."""

from __future__ import annotations

import pytest

from tools.bodies import LINES, bodies, copies
from tools.source import ROOT, python_files

ORIGINAL = '''
def unflatten(flat: Tensor, slot: int) -> list[Tensor]:
    """One docstring."""
    pieces: list[Tensor] = []
    start = 0
    for size in sizes(flat):
        end = start + size
        pieces.append(flat[start:end])
        if end % slot:
            end += slot - end % slot
        start = end
    return pieces
'''

# Another name, other locals, other docstring and annotations, other line breaks: the same body.
RENAMED = '''
class Layout:
    def split(self, buffer, *, unit: "int"):
        """Another docstring."""
        out = []
        at = 0
        for count in sizes(
            buffer
        ):
            stop = at + count
            out.append(buffer[at:stop])
            if stop % unit:
                stop += unit - stop % unit
            at = stop
        return out
'''


def test_the_two_sides_never_hold_the_same_arithmetic() -> None:
    sides = [
        {str(path): (ROOT / path).read_text() for path in python_files(side)}
        for side in ("reference", "fast")
    ]
    assert all(len(bodies(side)) > 0 for side in sides), "nothing was compared"
    assert copies(*sides) == []


def test_a_renamed_copy_is_found() -> None:
    (sentence,) = copies({"reference/a.py": ORIGINAL}, {"fast/b.py": RENAMED})
    assert "reference/a.py:2 unflatten" in sentence
    assert "fast/b.py:3 split" in sentence


def test_one_changed_operator_makes_it_another_body() -> None:
    other = RENAMED.replace("stop += unit", "stop -= unit")
    assert copies({"reference/a.py": ORIGINAL}, {"fast/b.py": other}) == []


def test_a_call_of_another_function_makes_it_another_body() -> None:
    other = RENAMED.replace("in sizes(", "in lengths(")
    assert copies({"reference/a.py": ORIGINAL}, {"fast/b.py": other}) == []


def test_bodies_shorter_than_the_limit_are_left_alone() -> None:
    short = ORIGINAL.split("        if end")[0] + "        start = end\n    return pieces\n"
    assert copies({"reference/a.py": short}, {"fast/b.py": short}) == []
    assert LINES == 8


CHECK = """
def check(names, given, where):
    lacking = [name for name in names if name not in given]
    if lacking:
        raise ValueError(f"{where} lacks {lacking}")
    for name in names:
        if not isinstance(given[name], float):
            raise TypeError(f"{name} is no number")
        if name == "lr":
            continue
        print(name)
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("print(name)", 0),
        ("print(given.numel())", 0),
        ("given[name] = 2.0 * given[name]", 1),
        ("given[name] += 1.0", 1),
        ("given[name].mul_(0.5)", 1),
        ("print(torch.isnan(given[name]))", 1),
    ],
)
def test_checks_may_be_alike_and_what_touches_values_may_not(line: str, found: int) -> None:
    code = CHECK.replace("print(name)", line)
    assert len(copies({"reference/a.py": code}, {"fast/b.py": code})) == found
