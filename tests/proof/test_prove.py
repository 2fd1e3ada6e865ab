"""Proofs of whole kernels: right ones are proved, wrong ones never are."""

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from torch import Tensor

from tests.helpers.proved_kernels import by_torch, by_triton, infinities_stay, row
from twinstep.parity.operations.operation import OptionValue
from twinstep.parity.prove import command, solver
from twinstep.parity.prove import situations as of_situations
from twinstep.parity.prove.prove import Prover
from twinstep.parity.prove.rows import as_proof, prove_situation
from twinstep.parity.prove.situations import Situation, situations
from twinstep.parity.records.errors import EXIT_BROKEN, EXIT_KEPT, EXIT_TOO_LITTLE
from twinstep.parity.records.proof import (
    NOT_PROVED,
    OUT_OF_TIME,
    PROVED,
    REFUTED,
    UNSUPPORTED,
    WORDS,
    Proof,
    Verdict,
)
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import Kernel, kernels
from twinstep.parity.registry.selection import Selection
from twinstep.parity.report.progress import during


def small(kernel: Kernel, dtype: str = "fp32") -> Verdict:
    """The verdict on the first small situation."""
    first = next(s for s in situations(kernel, [dtype]) if not s.aligned or not s.layout)
    options = {name: False if value is True else value for name, value in first.options.items()}
    sizes = tuple(min(size, 70) for size in first.sizes)
    subject = Situation(kernel, dtype, first.layout, sizes, first.aligned, options)
    return prove_situation(subject, 60.0, briefly=True)


@pytest.mark.parametrize(
    ("name", "dtype", "paths"),
    [
        ("triton.adamw_step", "bf16", 2),
        ("triton.sgd_step", "fp16-pure", 2),
        ("triton.adamw_remainder_step", "bf16", 2),
        ("triton.accumulate", "bf16-pure", 1),
        ("triton.unscale", "mixed", 2),
        ("triton.cast_copy", "fp16", 1),
        ("triton.flatten", "bf16", 1),
        ("triton.clip_factor", "scalar", 1),
        ("triton.clip_coefficient", "scalar", 1),
        ("triton.update_scale_dynamic", "scalar", 2),
        ("triton.update_scale_wrapper", "scalar", 3),
        ("triton.update_scale_torch", "scalar", 3),
    ],
)
def test_our_kernels_are_proved(name: str, dtype: str, paths: int) -> None:
    register_house()
    kernel = next(k for k in kernels() if k.name == name)
    verdict = small(kernel, dtype)
    assert (verdict.word, verdict.paths) == (PROVED, paths), verdict


def test_values_with_which_the_reference_divides_by_zero_are_no_part_of_a_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register_house()
    kernel = next(k for k in kernels() if k.name == "triton.mixed_step")
    options: dict[str, OptionValue] = {"rule": "dynamic", "consecutive_hysteresis": True}
    options |= dict.fromkeys(("adam_w_mode", "bias_correction", "raise_error_at_min_scale"), False)
    # An overflow shrinks the scale by a factor that the search for the floor's branch makes zero.
    spent = {"cur_iter": 2, "last_overflow_iter": 1, "cur_hysteresis": 1, "growth_tracker": 662}
    spent |= {"exhausted": 0, "scale_window": 38, "delayed_shift": 1}
    monkeypatch.setattr(of_situations, "settings", lambda *_: [spent])
    verdict = prove_situation(Situation(kernel, "fp16", "flat", (150,), True, options), 60.0)
    assert verdict.word == PROVED, verdict


def test_a_kernel_of_a_user_is_proved_on_both_sides_of_its_branch() -> None:
    verdict = small(row(by_triton(), "replay"))
    assert (verdict.word, verdict.paths) == (PROVED, 2), verdict
    assert verdict.elements == 2 * (3 * 70 + 1)
    assert verdict.kept["steps"]


@pytest.mark.parametrize("fault", ["factor of one", "large rate", "small beta", "contracted"])
def test_a_kernel_that_is_wrong_for_few_values_is_refuted(fault: str) -> None:
    verdict = small(row(by_triton(fault), "replay"))
    assert verdict.word == REFUTED, verdict
    assert "but should be" in verdict.detail


@pytest.mark.parametrize("signed", [True, False])
def test_a_scale_of_zero_refutes_no_kernel(signed: bool) -> None:
    verdict = small(infinities_stay(signed))
    assert (verdict.word != REFUTED) == signed, verdict


@pytest.mark.parametrize("fault", ["reciprocal", "one value", "halved"])
def test_a_kernel_of_another_formula_is_never_proved(fault: str) -> None:
    verdict = small(row(by_triton(fault), "replay"))
    assert verdict.word in (REFUTED, NOT_PROVED), verdict
    assert verdict.word == REFUTED or "kernel:" in verdict.detail


@pytest.mark.skipif(not solver.installed(), reason=solver.MISSING)
def test_a_kernel_that_is_wrong_for_one_value_is_refuted_by_the_solver() -> None:
    assert small(row(by_triton("one value"), "replay")).word == REFUTED


def test_without_the_solver_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "installed", lambda: False)
    monkeypatch.setattr(Prover, "_witness", lambda *_: None)
    verdict = small(row(by_triton("one value"), "replay"))
    assert verdict.word == NOT_PROVED
    assert solver.MISSING in verdict.detail


def test_a_kernel_in_torch_is_proved_and_its_branches_are_followed() -> None:
    assert small(row(by_torch(), "cpu")).word == PROVED
    verdict = small(row(by_torch("branch"), "cpu"))
    assert verdict.word == REFUTED
    assert "factor=" in verdict.detail


def test_an_operation_that_torch_may_fuse_is_named() -> None:
    verdict = small(row(by_torch("fused"), "cpu"))
    assert verdict.word == UNSUPPORTED
    assert "addcmul_" in verdict.detail
    assert "proved_kernels.py" in verdict.detail


def test_a_bounded_kernel_in_another_order_is_proved_over_the_reals_and_a_wrong_one_refuted() -> (
    None
):
    mine = replace(row(by_torch("other order"), "cpu"), arithmetic="bounded")
    assert small(replace(mine, arithmetic="exact")).word == REFUTED
    verdict = small(mine)
    assert verdict.word == PROVED, verdict
    assert "lerp" in " ".join(verdict.assumes)
    assert "equal over the real numbers" in " ".join(verdict.assumes)
    assert small(replace(mine, function=by_torch("other formula"))).word == REFUTED


@pytest.mark.parametrize("word", WORDS)
def test_nothing_but_a_proof_ends_with_0_and_it_names_its_sizes(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def _rows(*_: object) -> Iterator[list[Proof]]:
        kernel = next(k for k in kernels() if k.name == "triton.accumulate")
        verdict = Verdict(word, kept={"steps": (4,)})
        yield [as_proof(situation, verdict) for situation in situations(kernel, ["bf16"])]

    monkeypatch.setattr(command, "proved_rows", _rows)
    chosen = Selection(names=("triton.accumulate",), dtypes=("bf16",))
    expected = {REFUTED: EXIT_BROKEN, PROVED: EXIT_KEPT}.get(word, EXIT_TOO_LITTLE)
    with during("") as line:
        assert command.prove(None, chosen, None, 60.0, False, None, line) == expected
    shown = (
        "proved for flat 4300, flat 150 unaligned, list 4200+37, list 150+37 unaligned; steps = 4"
    )
    assert (shown in capsys.readouterr().out) == (word == PROVED)


def test_a_word_that_is_in_no_table_is_refused() -> None:
    with pytest.raises(ValueError, match="is none of proved, refuted"):
        Verdict("nearly proved")


def test_the_time_of_a_situation_ends_between_the_branches_of_one_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def adamw(*given: list[Tensor], **controls: Any) -> None:
        for at in range(given[0][0].numel()):
            if given[0][0].reshape(-1)[at].item() > 0.0:
                continue
        by_torch()(*given, **controls)

    seconds = count()
    monkeypatch.setattr(time, "process_time", lambda: float(next(seconds)))
    first = next(s for s in situations(row(adamw, "cpu"), ["fp32"]) if not s.aligned)
    plain = replace(first, sizes=(70,), options={"bias_correction": False})
    verdict = prove_situation(plain, 30.0)
    assert (verdict.word, verdict.paths) == (OUT_OF_TIME, 1), verdict
    assert next(seconds) < 40
