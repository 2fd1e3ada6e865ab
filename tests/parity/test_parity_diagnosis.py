"""One defect is one report; distinct ones are kept apart."""

from __future__ import annotations

from pathlib import Path

from twinstep.parity.records.ledger import Cell, Key, Ledger, Status
from twinstep.parity.registry.selection import Selection
from twinstep.parity.runner.diagnosis import diagnoses
from twinstep.parity.runner.load_file import load_file
from twinstep.parity.runner.recipes import Effort
from twinstep.parity.runner.session import Session

KERNEL = """
import torch
from twinstep.parity import register

@register("adamw_step", name="mine", dtypes=("fp32", "bf16"), layouts=("list",), engines=("cpu",))
def mine(params, grads, exp_avgs, exp_avg_sqs, copies, steps, *, lr, beta1, beta2, eps,
         weight_decay, factor, found_inf, bias_correction):
    if found_inf.item() != 0{skipped}:
        return
    lr, beta1, beta2 = lr.item(), beta1.item(), beta2.item()
    eps, weight_decay = eps.item(), weight_decay.item()
    for i, (p, m, v) in enumerate(zip(params, exp_avgs, exp_avg_sqs, strict=True)):
        steps[i] += 1
        t = int(steps[i])
        k1 = 1 - beta1**t if bias_correction else 1.0
        k2 = 1 - beta2**t if bias_correction else 1.0
        g = grads[i].float() * factor
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denominator = (v / k2{inside}).sqrt_().add_({outside})
        w = p.float() * (1 - lr * weight_decay)
        w.addcdiv_(m, denominator, value=-lr / k1)
        p.copy_(w)
        if copies:
            copies[i].copy_(w)
"""
INSIDE = "eps is added under the root: sqrt(v + eps), not sqrt(v) + eps"


def judged(folder: Path, *, inside: bool, skips: bool) -> Ledger:
    file = folder / "kernel.py"
    file.write_text(
        KERNEL.format(
            inside=" + eps" if inside else "",
            outside="0.0" if inside else "eps",
            skipped="" if skips else " and lr.item() < 0",
        )
    )
    laws = ("value", "skipped_step", "repeat")
    effort = Effort(examples=4, repros=str(folder / "parity_repros"), shrink_seconds=1.0)
    session = Session(selection=Selection(laws=laws), effort=effort)
    return session.run(load_file(str(file)).kernels)


def test_one_defect_is_one_report_with_one_cause_and_the_other_laws_by_name(
    tmp_path: Path,
) -> None:
    ledger = judged(tmp_path, inside=True, skips=True)
    assert ledger.counts()["failed"] >= 4
    (diagnosis,) = diagnoses(ledger)
    text = diagnosis.text()
    assert text.count("breaks `") == 1
    assert f"  cause    {INSIDE}" in text
    assert f"{len(diagnosis.cells)} cells in all" in " ".join(text.split())
    assert {cell.cause for cell in diagnosis.cells} == {INSIDE}
    assert Path(diagnosis.leading.repro).is_file()
    assert diagnosis.leading.record()["cause"] == INSIDE


def test_two_defects_are_two_reports(tmp_path: Path) -> None:
    found = diagnoses(judged(tmp_path, inside=True, skips=False))
    assert [one.leading.kind for one in found] == ["value", "skipped step"]
    assert found[0].leading.cause == INSIDE
    assert {cell.key.law for cell in found[1].cells} == {"skipped_step"}


def cell(law: str, dtype: str, **more: object) -> Cell:
    key = Key(operation="unscale", kernel="mine", dtype=dtype, law=law, engine="cpu")
    fields = {"kind": "value", "wrong": ("grads",), **more}
    text = f"mine breaks `{law}`"
    return Cell(key=key, status=Status.FAILED, failure=text, **fields)  # type: ignore[arg-type]


def grouped(*cells: Cell) -> list[set[tuple[str, str]]]:
    ledger = Ledger()
    for one in cells:
        ledger.add(one)
    return [{(c.key.law, c.key.dtype) for c in one.cells} for one in diagnoses(ledger)]


def test_rows_are_one_defect_if_cause_or_kind_and_place_are_the_same() -> None:
    one, two = cell("value", "fp16"), cell("value", "bf16")
    assert grouped(one, two) == [{("value", "fp16"), ("value", "bf16")}]
    known = cell("value", "bf16", cause="inv_scale is ignored")
    assert len(grouped(one, known)) == 2
    assert len(grouped(one, cell("value", "bf16", wrong=("found_inf",)))) == 2
    assert len(grouped(one, cell("value", "bf16", kind="hang"))) == 2
    other = cell("repeat", "fp16", kind="dependence")
    assert len(grouped(one, other)) == 2, "the judge has kept them apart in one row"
    assert len(grouped(one, cell("repeat", "fp16", kind="dependence", like="value"))) == 1


def test_the_report_is_that_of_the_failure_that_says_most() -> None:
    ledger = Ledger()
    ledger.add(cell("value", "fp16", kind="value", wrong=("a",)))
    ledger.add(cell("value", "bf16", kind="value", wrong=("a",), repro="file"))
    ledger.add(cell("repeat", "bf16", kind="value", like="value"))
    (diagnosis,) = diagnoses(ledger)
    assert diagnosis.leading.key.dtype == "bf16"
    assert diagnosis.text().endswith("also     value (fp16); repeat (bf16); 3 cells in all")


def test_a_failure_without_its_leader_is_still_reported() -> None:
    assert grouped(cell("repeat", "fp16", like="value")) == [{("repeat", "fp16")}]
