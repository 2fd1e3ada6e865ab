"""Modules that a file imports from beside it are as good as its own: classes, errors, dtypes."""

from __future__ import annotations

import enum
import pickle
from pathlib import Path

import numpy as np
import pytest

from twinstep.parity.records.ledger import Ledger, Status
from twinstep.parity.registry.selection import Selection
from twinstep.parity.runner.calls.messages import packed, unpacked
from twinstep.parity.runner.recipes import Effort
from twinstep.parity.runner.session import Session
from twinstep.parity.runner.source import Source

INNER = """
import enum
from typing import NamedTuple

class Kind(enum.Enum):
    FIRST = 1

class Combination(str, enum.Enum):
    BF16 = "bf16"

class Note(NamedTuple):
    kind: Kind
    steps: int

class Broken(RuntimeError):
    pass
"""
OUTER = """
from twinstep.reference.optimizers.fused_adam import FusedAdam
from .inner.words import Broken, Combination, Kind, Note

class Plain(FusedAdam):
    pass

class Mine(Plain):
    note = Note(Kind.FIRST, 0)

    def state_dict(self):
        return {**super().state_dict(), "note": self.note}

    def load_state_dict(self, state):
        self.note = state.get("note", self.note)
        super().load_state_dict({k: v for k, v in state.items() if k != "note"})

class Theirs(Mine):
    pass

def cast(sources, copies):
    for source, copy in zip(sources, copies, strict=True):
        copy.copy_(source)

def breaks(sources, copies):
    raise Broken("of a module beside it")
"""
LATE = """
def late(sources, copies):
    import later
    later.cast(sources, copies)
"""
FILE = """
from twinstep.parity import register, register_optimizer
from twinstep.parity.sequences import LenientAdamRules
from {} import Combination, Mine, Plain, Theirs, breaks, cast
from {} import late

register("cast_copy", name="right", dtypes=(Combination.BF16,))(cast)
register("cast_copy", name="late", dtypes=("bf16",))(late)
register("cast_copy", name="breaks", dtypes=("bf16",))(breaks)
"""
CLASSES = """
register_optimizer("mine", reference={}, dtypes=("fp32",){})({})
"""


def written(folder: Path, package: bool) -> Path:
    """A file with a package beside it, or one that is a module of that package."""
    top = folder / "steps"
    (top / "inner").mkdir(parents=True)
    for path, text in {
        "__init__.py": "",
        "inner/__init__.py": "",
        "inner/words.py": INNER,
        "outer.py": OUTER,
        "late.py": LATE,
    }.items():
        (top / path).write_text(text)
    (folder / "later.py").write_text("from steps.outer import cast\n")
    file = (top if package else folder) / "mine.py"
    names = (".outer", ".late") if package else ("steps.outer", "steps.late")
    file.write_text(FILE.format(*names))
    return file


def judged(file: Path, *laws: str) -> Ledger:
    opened = Source(file=str(file)).open()
    assert opened.subject is not None
    selection = Selection(laws=laws)
    effort = Effort(examples=1, repros=None, shrink_seconds=0.5)
    session = Session(selection=selection, effort=effort, subject=opened.subject)
    ledger = session.run(opened.kernels, opened.optimizers)
    opened.subject.close()
    return ledger


@pytest.mark.parametrize("package", [False, True], ids=["beside", "inside"])
def test_kernels_of_modules_beside_the_file_are_judged(tmp_path: Path, package: bool) -> None:
    ledger = judged(written(tmp_path, package), "value")
    cells = {key.kernel: cell for key, cell in ledger.cells.items() if cell.failure or cell.calls}
    assert cells["right"].status is Status.PASSED
    assert cells["late"].status is Status.PASSED
    assert "raises Broken: of a module beside it" in cells["breaks"].failure
    assert f"{tmp_path}/steps/outer.py:" in cells["breaks"].failure.splitlines()[0]


@pytest.mark.parametrize(
    "words",
    [('"FusedAdam"', "", "Plain"), ("Theirs", ", rules=LenientAdamRules()", "Mine")],
    ids=["plain", "enum_in_state"],
)
def test_classes_of_modules_beside_the_file_are_judged(
    tmp_path: Path, words: tuple[str, str, str]
) -> None:
    """With a reference of the file's own both have its Enum and its NamedTuple in their states."""
    file = written(tmp_path, False)
    file.write_text(file.read_text() + CLASSES.format(*words))
    ledger = judged(file, "sequences")
    (cell,) = [cell for cell in ledger.cells.values() if cell.status is not Status.NOT_CLAIMED]
    assert cell.status is Status.PASSED, cell


class Word(enum.StrEnum):
    """As a user has it."""

    BF16 = "bf16"


class Local(Exception):
    """As a user has it."""


def test_a_users_class_travels_as_its_name_and_his_plain_values_as_what_they_are() -> None:
    _, (kind, word, number) = unpacked(packed(("done", (Local, Word.BF16, np.float64(0.5)))))
    assert isinstance(kind, type)
    assert kind.__name__ == "Local"
    assert (type(word), word) == (str, "bf16")
    assert (type(number), number) == (float, 0.5)


def test_a_forged_class_is_still_refused() -> None:
    data = pickle.dumps(("done", Local))
    with pytest.raises(pickle.UnpicklingError, match="is no part of a message"):
        unpacked(data)
