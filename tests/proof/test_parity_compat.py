"""Other people's tests on our classes: the page, and a sample of its cases."""

from __future__ import annotations

import pytest
import torch

from twinstep.parity.proof.compat import PAGE, judged, page, run_error, run_input

pytestmark = pytest.mark.usefixtures("replay")


@pytest.mark.parametrize("side", ["reference", "fast"])
def test_a_sample_of_the_cases_ends_as_the_page_has_it(side: str) -> None:
    assert run_input(torch.optim.AdamW, {"lr": 0.01}, side) == ""
    assert run_input(torch.optim.Adam, {"weight_decay": 0.1}, side) == ""
    refused = run_input(torch.optim.AdamW, {"maximize": True}, side)
    assert judged("inputs", "maximize", side, refused).why == "refused: negate the loss"
    wrong = {"betas": (1.0, 0.0)}
    assert run_error(None, wrong, ValueError, side) == ""
    assert "ValueError for TypeError" in run_error(None, wrong, TypeError, side)


def test_only_the_known_failure_has_the_known_reason() -> None:
    assert not judged("errors", "weight_decay should > 0", "fast", "KeyError").known
    assert judged("errors", "weight_decay should > 0", "fast", "no error").known
    assert not judged("inputs", "amsgrad", "fast", "KeyError: 'amsgrad'").known


def test_the_page_has_no_other_failures() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    outcomes = {row[2] for row in rows[2:]}
    assert "as torch" in outcomes
    assert all(one == "as torch" or one.startswith(("refused: ", "taken: ")) for one in outcomes)
    assert page([judged("a", "b", "fast", "")]).endswith("| a | b | as torch | fast |\n")
