"""Numbers that a launcher reads and passes on keep their names: as arguments, and as branches."""

import pytest

from tests.helpers.launched_kernels import row
from twinstep.parity.prove.rows import prove_situation
from twinstep.parity.prove.situations import Situation
from twinstep.parity.records.proof import NOT_PROVED, PROVED, REFUTED, UNSUPPORTED, Verdict
from twinstep.replay.cuda import nvrtc


def verdict_on(fault: str = "", aligned: bool = True) -> Verdict:
    return prove_situation(
        Situation(row(fault), "fp32", "flat", (70,), aligned, {"nesterov": False}), 60.0
    )


@pytest.mark.parametrize("aligned", [True, False])
def test_arguments_read_from_controls_are_proved(aligned: bool) -> None:
    verdict = verdict_on(aligned=aligned)
    assert (verdict.word, verdict.paths) == (PROVED, 2), verdict


@pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing() or "installed")
def test_arguments_of_cuda_kernels_are_proved_in_both_widths() -> None:
    verdict = verdict_on("cuda")
    assert (verdict.word, verdict.paths) == (PROVED, 2), verdict


@pytest.mark.parametrize(
    "fault", ["large rate", "host branch", "heuristic", "grid", "a float", "contracted"]
)
def test_what_an_argument_decides_is_followed(fault: str) -> None:
    verdict = verdict_on(fault)
    assert verdict.word == REFUTED, verdict


def test_another_rounding_of_an_argument_is_never_proved() -> None:
    assert verdict_on("formed in fp32").word in (REFUTED, NOT_PROVED)


def test_a_number_with_a_name_is_not_compiled_in() -> None:
    verdict = verdict_on("compiled in")
    assert verdict.word == UNSUPPORTED
    assert "is compiled in" in verdict.detail
    assert "argument LARGE" in verdict.detail
