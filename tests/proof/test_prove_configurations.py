"""Configurations of an autotuner compared with one another: one set of bits, or the sets."""

import pytest
from rich.console import Console

from tests.helpers.configured_kernels import configured_row
from twinstep.parity.prove import solver
from twinstep.parity.prove.configurations import compare, configurations_of
from twinstep.parity.prove.configurations_command import compare_configurations
from twinstep.parity.prove.situations import Situation
from twinstep.parity.records.errors import EXIT_BROKEN, EXIT_KEPT
from twinstep.parity.records.proof import REFUTED
from twinstep.parity.registry.kernels import Kernel

DTYPE = "fp32"


def situation(kernel: Kernel) -> Situation:
    return Situation(kernel, DTYPE, "flat", (150,), False, {})


def test_blocks_and_warps_give_one_set_of_bits() -> None:
    kernel = configured_row(["", "", "other"])
    own = situation(kernel)
    found = configurations_of(kernel, own)
    assert len(found) == 3
    sets = compare(own, found, 60.0)
    assert sets.words == "3 configurations give 1 set of bits"


def test_a_configuration_that_rounds_elsewhere_is_a_set_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kernel = configured_row(["", "rounded", ""])
    own = situation(kernel)
    sets = compare(own, configurations_of(kernel, own), 60.0)
    assert sets.words == "3 configurations give 2 sets of bits"
    assert [len(names) for names in sets.members] == [2, 1]
    assert sets.apart[0].word == REFUTED


@pytest.mark.skipif(not solver.installed(), reason=solver.MISSING)
def test_configurations_of_other_formulas_are_one_set_where_the_solver_proves_it() -> None:
    kernel = configured_row(["", "minus"])
    own = situation(kernel)
    assert len(compare(own, configurations_of(kernel, own), 60.0).members) == 1


def test_the_command_says_how_many_sets_and_fails_where_two_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "twinstep.parity.prove.configurations_command.situations",
        lambda kernel, dtypes: [situation(kernel)],
    )
    console = Console(record=True, width=200)
    two = [configured_row([""], "one"), configured_row(["other"], "two")]
    assert compare_configurations(console, two, (), 60.0) == EXIT_KEPT
    assert "2 configurations give 1 set of bits" in console.export_text()
    wrong = [two[0], configured_row(["rounded"], "three")]
    assert compare_configurations(console, wrong, (), 60.0) == EXIT_BROKEN
    shown = console.export_text()
    assert "2 configurations give 2 sets of bits" in shown
    assert "but in an earlier set it is" in shown
