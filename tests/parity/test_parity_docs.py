"""The pages for users: every code block and every example file is judged outside the checkout."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers.command import parity
from twinstep.parity.expected.bounded import Bounded
from twinstep.parity.expected.carried import known
from twinstep.parity.operations.operation import Operation
from twinstep.parity.operations.table import operation_named
from twinstep.parity.records.errors import UsageError
from twinstep.parity.registry.kernels import register_operation, registrations
from twinstep.parity.runner.load_file import load_file

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "guide"
BLOCK = re.compile(r"```python\n# (\S+\.py)\n(.*?)```", re.DOTALL)
PAGES = {
    "adding-an-optimizer.md": ["my_lion_of_torch.py", "my_adam.py", "my_scaler.py", "my_lion.py"],
    "adding-an-operation.md": ["my_operation.py"],
}
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def blocks(page: str) -> dict[str, str]:
    return dict(BLOCK.findall((DOCS / page).read_text()))


@pytest.mark.parametrize("page", PAGES)
def test_the_page_has_its_examples_and_no_other_code(page: str) -> None:
    assert list(blocks(page)) == PAGES[page]
    assert (DOCS / page).read_text().count("```python") == len(PAGES[page])


@pytest.mark.parametrize(("page", "name"), [(p, name) for p, row in PAGES.items() for name in row])
def test_every_code_block_keeps_every_law(page: str, name: str, capsys: Capture) -> None:
    Path(name).write_text(blocks(page)[name])
    assert parity("check", name, "--quick") == 0, capsys.readouterr().out


def test_the_kernel_of_the_tour_is_accepted_and_rejected_with_a_bug(capsys: Capture) -> None:
    text = blocks("../../README.md")["my_kernel.py"]
    Path("my_kernel.py").write_text(text)
    assert parity("check", "my_kernel.py") == 0, capsys.readouterr().out
    assert "my_cast" in capsys.readouterr().out
    truncated = replaced(text, "copy.copy_(source)", "copy.copy_(source * 1.01)")
    Path("my_kernel.py").write_text(truncated)
    assert parity("check", "my_kernel.py") == 1, capsys.readouterr().out
    assert list(Path("parity_repros").glob("repro_*.py"))


def test_what_the_page_says_about_the_last_two_methods_is_so(capsys: Capture) -> None:
    text = blocks("adding-an-optimizer.md")["my_adam.py"]
    loading, copying = text.index("    def load_state_dict"), text.index("    def __getstate__")
    Path("no_load.py").write_text(text[:loading] + text[copying:])
    assert parity("check", "no_load.py", "--dtype", "fp32", "--jobs", "1") == 1
    assert "kept.state[0].step differs" in capsys.readouterr().out
    Path("no_copy.py").write_text(text[:copying])
    assert parity("check", "no_copy.py", "--dtype", "fp32", "--jobs", "1") == 1
    assert "sequences" in capsys.readouterr().out


LAWS = [word for law in ("value", "non_finite", "boundary_sizes") for word in ("--law", law)]


@pytest.mark.parametrize(
    ("name", "engine"),
    [("lion", "cpu"), ("muon", "cpu"), ("adafactor", "cpu"), ("adam8bit", "replay")],
)
def test_an_example_operation_tells_its_right_kernel_from_its_wrong_one(
    name: str, engine: str, capsys: Capture
) -> None:
    file = f"{name}_operation.py"
    Path(file).write_text((ROOT / "examples" / file).read_text())
    laws = LAWS if engine == "cpu" else LAWS[:2]
    flags = ("--quick", "--jobs", "1", "--dtype", "fp32", *laws)
    right = parity("check", file, "--kernel", f"right_{name}", *flags)
    assert right == 0, capsys.readouterr().out
    assert parity("check", file, "--kernel", f"wrong_{name}", *flags) == 1
    assert f"[wrong_{name}, fp32, {engine}] breaks `value`" in capsys.readouterr().out


def replaced(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("        reference=signed_step,\n", "", "missing 1 required keyword-only argument"),
        ("reference=signed_step", "reference=None", "reference is None, but should be a function"),
        ("def signed_step(params, grads,", "def signed_step(grads, params,", "positional argument"),
        ('name="signed_step"', 'name="adamw_step"', 'operation "adamw_step" exists already'),
        ('laws=("value"', 'laws=("gravity"', 'laws has "gravity"'),
        ('writes=("params",)', 'writes=("momentum",)', 'writes has "momentum"'),
        ('writes=("params",)', "writes=()", "writes and laws should name at least one"),
        ('"grads": (torch.bfloat16,)', '"grads": ("bf16",)', "should have a tuple of torch dtypes"),
        (', "grads": (torch.bfloat16,)', "", 'combination "bf16" lacks grads'),
        ('"grads": (torch.bfloat16,)', '"gads": (torch.bfloat16,)', 'has "gads", but should name'),
        ('dtypes=("fp32", "bf16")', 'dtypes=("fp16",)', 'dtypes has "fp16"'),
    ],
)
def test_a_wrong_operation_is_refused_in_one_sentence(old: str, new: str, says: str) -> None:
    text = blocks("adding-an-operation.md")["my_operation.py"]
    Path("mine.py").write_text(replaced(text, old, new))
    with pytest.raises(UsageError) as caught:
        load_file("mine.py")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_operation_that_is_refused_leaves_nothing_behind() -> None:
    base = operation_named("accumulate", "test")
    bad: Operation = replace(base, name="new", combinations={})
    with registrations():
        with pytest.raises(UsageError, match="combinations is empty"):
            register_operation(bad)
        with pytest.raises(UsageError, match='operation "new" is unknown'):
            operation_named("new", "test")


Product = Callable[[Tensor, Tensor], Tensor]


def in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """One product after the other, rounded at each step: the worst honest order."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        total = total + a[:, k : k + 1] * b[k : k + 1]
    return total


def in_bf16(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a.bfloat16(), b.bfloat16()).float()


@pytest.mark.parametrize(
    ("product", "honest"), [(torch.mm, True), (in_fp32, True), (in_bf16, False)]
)
def test_the_bound_of_a_matrix_product_holds_for_any_order_and_not_for_fewer_bits(
    product: Product, honest: bool
) -> None:
    source = torch.Generator().manual_seed(3)
    a, b = (torch.randn(n, k, generator=source) for n, k in ((7, 33), (33, 5)))
    carried = torch.mm(Bounded(known(a)), Bounded(known(b)))
    assert isinstance(carried, Bounded)
    exact = a.double() @ b.double()
    assert torch.equal(carried.carried.exact, exact)
    ratio = (product(a, b).double() - exact).abs() / carried.carried.error
    assert (float(ratio.max()) <= 1.0) == honest
