"""A class with torch's interface alone is judged by what torch promises, as a user writes it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from twinstep.parity.proof.corpus.ordinary_classes import (
    FAULTS,
    ForeachAdam,
    HeavyBall,
    LoopAdamW,
    LoopLion,
    source_of,
)
from twinstep.parity.records.errors import UsageError
from twinstep.parity.records.ledger import Cell, Status
from twinstep.parity.sequences.contracts import Contract
from twinstep.parity.sequences.errors_carried import Near, carried_contracts, known
from twinstep.parity.sequences.judge import SEQUENCES, TwinEffort, judge_twin, twin_engine, usual
from twinstep.parity.sequences.registry import (
    ORDINARY,
    Twin,
    borrowed_twins,
    register_optimizer,
    rules_of,
    undriven,
)
from twinstep.parity.sequences.repro import carried
from twinstep.parity.sequences.torch_rules import constructor
from twinstep.parity.sequences.world import World
from twinstep.reference.optimizers.ordinary import Lion, adamw

HEAD = """
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from twinstep.parity import register_optimizer

Closure = Callable[[], float]


@register_optimizer(reference="AdamW", dtypes=("fp32",))
"""
TRITON = """
import torch
import triton
import triton.language as tl

from twinstep.parity import register_optimizer


@triton.jit
def adamw_kernel(p_ptr, g_ptr, m_ptr, v_ptr, n, rate, keep, b1, c1, b2, c2, eps, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    inside = at < n
    g = tl.load(g_ptr + at, mask=inside)
    m = b1 * tl.load(m_ptr + at, mask=inside) + c1 * g
    v = b2 * tl.load(v_ptr + at, mask=inside) + c2 * g * g
    p = tl.load(p_ptr + at, mask=inside) * keep - rate * m / (tl.sqrt(v) + eps)
    tl.store(p_ptr + at, p, mask=inside)
    tl.store(m_ptr + at, m, mask=inside)
    tl.store(v_ptr + at, v, mask=inside)


@register_optimizer(reference="AdamW", dtypes=("fp32",))
class TritonAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None or p.numel() == 0:
                    continue
                state = self.state[p]
                if not state:
                    state["t"] = 0
                    state["m"], state["v"] = torch.zeros(2, p.numel(), device=p.device)
                state["t"] += 1
                k1, k2 = 1 - b1 ** state["t"], 1 - b2 ** state["t"]
                weight = p.contiguous()
                adamw_kernel[(triton.cdiv(p.numel(), 256),)](
                    weight, p.grad.contiguous(), state["m"], state["v"], p.numel(),
                    group["lr"] * k2**0.5 / k1, 1 - group["lr"] * group["weight_decay"],
                    b1, 1 - b1, b2, 1 - b2, group["eps"] * k2**0.5, B=256,
                )
                p.copy_(weight)
        return loss
"""


def registered(cls: type, reference: str, **given: Any) -> Twin:
    with borrowed_twins() as found:
        register_optimizer(reference=reference, **given)(cls)
    return found[0]


def judged(twin: Twin, dtype: str, sequences: int = SEQUENCES) -> Cell:
    effort = TwinEffort(sequences=usual(twin.rules, sequences), shrunk_by=0, repros=None)
    return judge_twin(twin, dtype, twin_engine(twin), effort)


class Foreach(torch.optim.AdamW):
    """On lists of tensors."""

    def __init__(self, params: Any, **given: Any) -> None:
        super().__init__(params, foreach=True, **given)


TORCHS = [(torch.optim.AdamW, "AdamW"), (torch.optim.Adam, "Adam"), (torch.optim.SGD, "SGD")]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("cls", "reference"), [*TORCHS, (Foreach, "AdamW"), (Lion, "Lion")])
def test_torchs_own_classes_are_right(cls: type, reference: str, dtype: str) -> None:
    cell = judged(registered(cls, reference, dtypes=(dtype,)), dtype, 32)
    assert cell.status is Status.PASSED, cell.failure
    assert (cell.sequences, usual(rules_of(Lion))) == (19, 96)


@pytest.mark.parametrize(("cls", "reference"), TORCHS)
def test_torchs_own_classes_have_the_references_bits(cls: type, reference: str) -> None:
    cell = judged(registered(cls, reference, arithmetic="exact"), "fp32", 24)
    assert cell.status is Status.PASSED, cell.failure
    other = registered(ForeachAdam, "Adam", arithmetic="exact")
    assert judged(other, "fp32", 40).status is Status.FAILED


@pytest.mark.parametrize("method", ["step", "zero_grad", "add_param_group", "load_state_dict"])
def test_a_method_that_does_nothing_is_noticed(method: str) -> None:
    idle = type("Idle", (torch.optim.AdamW,), {method: lambda self, *given, **named: None})
    with borrowed_twins() as found:
        register_optimizer("idle", reference="AdamW")(idle)
    assert judged(found[0], "fp32").status is Status.FAILED


def test_every_public_method_has_an_action() -> None:
    for reference, rules in ORDINARY.items():
        assert undriven(reference, rules) == []
        assert len(rules.scripts()) == len(rules.motifs)
        assert rules_of(reference) is rules


def test_a_repro_file_carries_these_rules() -> None:
    for rules in ORDINARY.values():
        assert carried(type(rules))[-1] == type(rules).__module__


def folded(p: Any, g: Any, m: Any, v: Any, t: int, group: dict[str, Any]) -> Any:
    (b1, b2), lr = group["betas"], group["lr"]
    m, v = m + (1 - b1) * (g - m), b2 * v + (1 - b2) * (g * g)
    rate, root = lr * (1 - b2**t) ** 0.5 / (1 - b1**t), (1 - b2**t) ** 0.5
    return p - lr * group["weight_decay"] * p - rate * (m / (v.sqrt() + group["eps"] * root))


def reciprocal(p: Any, g: Any, m: Any, v: Any, t: int, group: dict[str, Any]) -> Any:
    (b1, b2), lr = group["betas"], torch.tensor(group["lr"])
    m, v = (b1 * m + (1 - b1) * g) / (1 - b1**t), (v * b2 + g * (1 - b2) * g) / (1 - b2**t)
    return p * (1 - lr * group["weight_decay"]) - m * lr * (1 / (v.sqrt() + group["eps"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", [folded, reciprocal])
def test_another_way_to_write_it_is_inside_and_another_formula_is_not(
    way: Any, dtype: torch.dtype
) -> None:
    source = torch.Generator().manual_seed(3)
    group = {"lr": 0.25, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    m, v = torch.zeros(2, 4000, dtype=dtype)
    state: dict[str, Any] = {}
    for t in range(1, 21):
        p, g = torch.randn(2, 4000, generator=source).to(dtype)
        g = (g * 10.0 ** -torch.randint(0, 8, (4000,), generator=source)).to(dtype)
        near, state = adamw(known(p), known(g), state, group)  # type: ignore[arg-type]
        found = way(p, g, m, v, t, group)
        m, v = m + (1 - 0.9) * (g - m), 0.999 * v + (1 - 0.999) * (g * g)
        accepted = near.accepted()  # type: ignore[attr-defined]
        assert bool(accepted.accepts(found).all()), t
        other = found + (1e-5 if dtype is torch.float32 else 0.2)
        assert float(accepted.accepts(other).float().mean()) < 0.02, t


def test_a_sign_is_open_where_its_error_reaches_zero_and_only_there() -> None:
    exact = torch.tensor([1.0, -1.0, 1e-9, 0.0], dtype=torch.float64)
    error = torch.tensor([0.1, 0.1, 1e-8, 0.0], dtype=torch.float64)
    found = Near(exact, error, torch.float32).sign()
    assert (found.exact - found.error).tolist() == [1.0, -1.0, -1.0, 0.0]
    assert (found.exact + found.error).tolist() == [1.0, -1.0, 1.0, 0.0]


def test_parameters_without_gradient_have_no_contract() -> None:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    params[1].grad = torch.ones(2)
    optimizer = Lion(params)
    world = World(Lion, {}, params, optimizer, torch.device("cpu"))
    (contract,) = carried_contracts(world, Lion.equation)
    assert isinstance(contract, Contract)
    assert list(contract.accepted) == ["params[1]"]
    assert contract.follows


def test_arguments_of_a_constructor_are_found_through_keywords() -> None:
    takes, needs = constructor(Foreach)
    assert {"params", "lr", "betas", "amsgrad"} <= set(takes)
    assert needs == ["params"]
    assert constructor(HeavyBall)[0] == ["params", "lr", "momentum"]
    rules = rules_of(registered(HeavyBall, "SGD").reference)
    assert rules.remark(HeavyBall) == (
        "HeavyBall is judged without weight_decay, dampening, nesterov, which it does not take"
    )


def test_what_a_class_lacks_is_listed_at_once() -> None:
    class Short:
        """Nearly no optimizer."""

        def __init__(self, params: Any, lr: float) -> None:
            """Nothing."""

        def step(self, closure: Any = None) -> None:
            """Nothing."""

    class Named(torch.optim.SGD):
        def __init__(self, params: Any, rate: float) -> None:
            super().__init__(params, rate)

    methods = "add_param_group, load_state_dict, state_dict, zero_grad"
    with pytest.raises(UsageError, match=f"Short lacks {methods}, but should have every"):
        registered(Short, "SGD")
    with pytest.raises(UsageError, match='lacks initialize_states.*reference="AdamW"'):
        registered(LoopAdamW, "FusedAdam")
    with pytest.raises(UsageError, match="constructor of Named lacks lr, but should take"):
        registered(Named, "SGD")
    with pytest.raises(UsageError, match="constructor of HeavyBall lacks betas, eps, weight_dec"):
        registered(HeavyBall, "AdamW")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(file: Path, text: str, *more: str) -> subprocess.CompletedProcess[str]:
    file.write_text(text)
    command = [sys.executable, "-m", "twinstep.parity", "check", str(file), "--jobs", "1", *more]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_class_with_a_triton_kernel_is_judged_from_its_file(folder: Path) -> None:
    done = check(folder / "right.py", TRITON, "--examples", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TritonAdamW" in done.stdout
    wrong = TRITON.replace("tl.sqrt(v) + eps", "tl.sqrt(v + eps)")
    done = check(folder / "wrong.py", wrong, "--examples", "3")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "breaks `sequences` (value): params[0]" in done.stdout


def test_a_wrong_class_is_shown_again_by_its_repro_file(folder: Path) -> None:
    name, says, piece, other = next(row[1:] for row in FAULTS if row[1] == "RateOfTheConstructor")
    right, wrong = source_of(LoopAdamW, name), source_of(LoopAdamW, name, piece, other)
    file = folder / "mine.py"
    began = time.process_time()
    done = check(file, HEAD + wrong)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"AdamW[{name}, fp32, cpu] breaks `sequences`" in done.stdout, says
    assert "accepted" in done.stdout
    (path,) = re.findall(r"parity_repros/\S+\.py", done.stdout)[:1]
    again = [sys.executable, str(folder / path)]
    assert subprocess.run(again, capture_output=True, check=False).returncode == 1
    file.write_text(HEAD + right)
    assert subprocess.run(again, capture_output=True, check=False).returncode == 0
    assert time.process_time() - began < 150


def test_lion_is_judged_from_its_file(folder: Path) -> None:
    text = HEAD.replace('"AdamW", dtypes=("fp32",)', '"Lion"') + source_of(LoopLion)
    done = check(folder / "lion.py", text, "--examples", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bf16 fp32" in done.stdout
