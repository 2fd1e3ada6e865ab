"""The reference's arithmetic: what its source may not say, and what its scalars must be."""

from __future__ import annotations

import ast
import math
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import twinstep.reference.arithmetic as arithmetic
from tests.oracles.rational import FP32, FP64, rounded, rounded_root
from twinstep.parity.cases.fixed_inputs import anything, bits, from_bits, words

FOLDER = Path(arithmetic.__file__).parent
# Has the bits of torch.optim, which come of these very operations: they are those of the machine.
TORCHS = "ordinary.py"
FILES = sorted(file for file in FOLDER.rglob("*.py") if file.name != TORCHS)

KEYWORDS = {"alpha", "value", "out", "beta"}
CALLS = {
    "addcmul",
    "addcdiv",
    "addmm",
    "dot",
    "exp",
    "fma",
    "hypot",
    "lerp",
    "log",
    "matmul",
    "mean",
    "norm",
    "pow",
    "prod",
    "reciprocal",
    "rsqrt",
    "std",
    "sum",
    "vector_norm",
}
MATH = {"fsum", "isfinite", "sqrt"}
# Classes keep state, and write it.
IN_PLACE = {
    "apex_lamb.py": {"copy_"},
    "bf16.py": {"copy_", "zero_", "requires_grad_"},
    "partitioned_groups.py": {"copy_", "zero_", "requires_grad_"},
    "zero_masters.py": {"copy_"},
    "zero_groups.py": {"copy_", "zero_"},
    "flat_groups.py": {"copy_", "requires_grad_"},
    "fp16.py": {"copy_"},
    "fp16_unfused.py": {"copy_", "requires_grad_"},
    "fused_adam.py": {"copy_", "fill_"},
    "fused_lamb.py": {"add_", "copy_"},
}
ROOTS = {"sqrt_rn": "torch", "root_of_squares": "math", "step_size_of": "math"}
ROOTS |= {"norm_of_squares": "math"}
# Norms are read to decide whether a step is taken.
READS = {"found_inf", "step", "norm", "scaled_norm"}
READERS = {"loss_scale.py", "fused_adam.py", "fused_lamb.py", "scalers.py"}
# Sums of whole numbers, and norms that are made of them.
READERS |= {"collectives.py", "model_norm.py", "parallelism.py"}
READERS |= {"scaled_wrapper.py", "bf16.py", "zero_report.py"}
SCALAR_ROOT = ("lamb.py", "step_size_of")
SUMS = {"model_norm.py", "flat_groups.py", "partition.py", "partitioned_groups.py"}
# Norms of type p other than 1, 2 and infinity are not exact.
POWERS = {("model_norm.py", "_sum_of_powers")}
LISTED = {("norm.py", "elements")}


def called(node: ast.Call) -> tuple[str, str]:
    """Name of the receiver (if it is a plain name) and of what is called."""
    if isinstance(node.func, ast.Attribute):
        receiver = node.func.value
        return (receiver.id if isinstance(receiver, ast.Name) else ""), node.func.attr
    return "", node.func.id if isinstance(node.func, ast.Name) else ""


def call_violations(node: ast.Call, file: str, function: str) -> list[str]:
    receiver, name = called(node)
    found = [f"{k.arg}=" for k in node.keywords if k.arg in KEYWORDS]
    plain_sum = name == "sum" and isinstance(node.func, ast.Name) and file in SUMS
    timed = ast.unparse(node.func) == "self.timers.log"
    if (name in CALLS and not plain_sum and not timed) or "foreach" in name:
        found.append(name)
    if name == "sqrt" and ROOTS.get(function) != receiver:
        found.append(f"{receiver}.sqrt in {function}")
    if receiver == "math" and name not in MATH:
        found.append(f"math.{name}")
    in_place = name.endswith("_") and not name.startswith("_")
    if in_place and name not in IN_PLACE.get(file, set()):
        found.append(name)
    reads = receiver in READS or file in READERS or (file, function) == SCALAR_ROOT
    if name == "item" and not reads:
        found.append(f"{receiver}.item")
    if name in ("tolist", "numpy") and (file, function) not in LISTED:
        found.append(name)
    return found


def first(module: str) -> str:
    """First name of a module, that of the project apart."""
    return module.removeprefix("twinstep.").split(".")[0]


def import_violations(node: ast.stmt) -> list[str]:
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or "."]
    allowed = {"torch", "contract", "reference", *sys.stdlib_module_names}
    return [f"import {name}" for name in names if first(name) not in allowed]


def violations(source: str, file: str = "x.py") -> list[str]:
    """Statements of a reference file that it may not have, as `line: what`."""
    found: list[str] = []

    def visit(node: ast.AST, function: str) -> None:
        said: list[str] = []
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.Call):
            said = call_violations(node, file, function)
        elif isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(
            node.op, ast.Pow | ast.MatMult
        ):
            powers_of_two = isinstance(node, ast.BinOp) and isinstance(node.left, ast.Constant)
            in_float64 = (file, function) in POWERS
            said = [] if powers_of_two or in_float64 else [type(node.op).__name__]
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Sub | ast.Mult | ast.Div):
            said = [f"in-place {type(node.op).__name__}"]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            said = import_violations(node)
        found.extend(f"{getattr(node, 'lineno', 0)}: {what}" for what in said)
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(source), "")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_reference_source_says_only_what_rounds_once(path: Path) -> None:
    assert violations(path.read_text(), path.name) == []


BAD = [
    "p = torch.add(p, u, alpha=-lr)",
    "v = v.addcmul(g, g, value=c2)",
    "p = p.addcdiv(m, d)",
    "m = torch.lerp(m, g, c1)",
    "k = beta ** t",
    "v = torch.pow(g, 2)",
    "u = m * v.rsqrt()",
    "n = g.norm()",
    "n = torch.linalg.vector_norm(g)",
    "s = (g * g).sum()",
    "s = sum(values)",
    "torch._foreach_mul(ps, 2)",
    "d = torch.sqrt(v)",
    "d = v.sqrt()",
    "def sqrt_rn(x): return x.sqrt()",
    "x = math.exp(1.0)",
    "x = math.sqrt(1.0)",
    "p.mul_(2)",
    "p *= 2",
    "torch.add(p, u, out=p)",
    "x = g.item()",
    "x = g.tolist()",
    "import numpy",
    "from twinstep.fast.kernels.adam import adam_step_",
    "import triton.language as tl",
]


@pytest.mark.parametrize("source", BAD)
def test_source_check_rejects(source: str) -> None:
    assert len(violations(source)) >= 1


def test_source_check_accepts_the_adam_equation() -> None:
    assert violations("import torch\nu = (m / k1) / (sqrt_rn(v / k2) + eps)\n") == []


def fp32_sample(count: int, seed: int) -> torch.Tensor:
    x = anything(count, seed, torch.float32).abs()
    return x[torch.isfinite(x)]


def test_sqrt_rn_is_correctly_rounded() -> None:
    x = fp32_sample(4000, 1)
    truth = [rounded_root(Fraction(value), FP32) for value in x.tolist()]
    assert arithmetic.sqrt_rn(x).tolist() == truth


def test_sqrt_rn_is_correctly_rounded_at_perfect_squares_and_their_neighbours() -> None:
    odd = [(0x800000 + (word % 0x800000)) | 1 for word in words(500, 2)]
    near = [rounded(Fraction(n * n, 2**24), FP32) for n in odd]
    x = torch.tensor(near, dtype=torch.float32)
    x = torch.cat([x, torch.nextafter(x, torch.zeros(())), torch.nextafter(x, x + 1e9)])
    truth = [rounded_root(Fraction(value), FP32) for value in x.tolist()]
    assert arithmetic.sqrt_rn(x).tolist() == truth


def test_sqrt_rn_keeps_ieee_specials() -> None:
    x = torch.tensor([0.0, -0.0, torch.inf, -1.0, torch.nan, 2.0**-149])
    roots = arithmetic.sqrt_rn(x)
    wanted = torch.tensor([0.0, -0.0, torch.inf, torch.nan, torch.nan, 2.0**-74.5])
    assert bits(roots) == bits(wanted)


BETAS = [0.0, 0.5, 0.9, 0.95, 0.98, 0.999, 0.9999, 0.99999999]


@pytest.mark.parametrize("beta", BETAS)
def test_one_minus_is_a_float64_difference_rounded_once(beta: float) -> None:
    in_float64 = rounded(1 - Fraction(beta), FP64)
    truth = rounded(Fraction(in_float64), FP32)
    assert arithmetic.one_minus(torch.tensor(beta, dtype=torch.float64)).item() == truth


def test_one_minus_differs_from_the_fp32_difference() -> None:
    beta = torch.tensor(0.999, dtype=torch.float64)
    assert arithmetic.one_minus(beta) != 1 - beta.float()


def rational_power(base: float, exponent: int) -> float:
    """Square-and-multiply, lowest bit first, every product a fraction rounded to float64."""
    result, square = 1.0, base
    for bit in reversed(bin(exponent)[2:]):
        if bit == "1":
            result = rounded(Fraction(result) * Fraction(square), FP64)
        square = rounded(Fraction(square) * Fraction(square), FP64)
    return result


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 7, 10, 255, 256, 1000, 123456])
@pytest.mark.parametrize("beta", BETAS)
def test_power_is_square_and_multiply_in_float64(beta: float, exponent: int) -> None:
    got = arithmetic.power(torch.tensor(beta, dtype=torch.float64), exponent).item()
    assert got == rational_power(beta, exponent)


@pytest.mark.parametrize("exponent", [1, 5, 100, 5000])
def test_power_is_close_to_the_real_power(exponent: int) -> None:
    got = arithmetic.power(torch.tensor(0.999, dtype=torch.float64), exponent).item()
    real = Fraction(0.999) ** exponent
    products = 2 * exponent.bit_length()
    # Squaring doubles a relative error: after k squarings of a 2^e-th power it is below 2^e u.
    assert abs(Fraction(got) / real - 1) <= Fraction(2 * exponent + products, 2**53)


def test_power_refuses_a_negative_exponent() -> None:
    with pytest.raises(ValueError, match="exponent=-1, but should be at least 0"):
        arithmetic.power(torch.tensor(0.9, dtype=torch.float64), -1)


def test_bias_correction_of_the_first_step_is_one_minus_beta() -> None:
    for beta in BETAS:
        b = torch.tensor(beta, dtype=torch.float64)
        assert arithmetic.bias_correction_of(b, 1) == arithmetic.one_minus(b)


def test_subnormals_are_alive() -> None:
    smallest = from_bits([1], torch.float32)
    assert (smallest * 1.0).item() == 2.0**-149
    assert (torch.full((64,), 2.0**-126) * 0.5).tolist() == [2.0**-127] * 64


def test_words_are_the_published_sequence() -> None:
    assert words(3, 1234567)[:2] == [6457827717110365317, 3203168211198807973]


def test_rounded_agrees_with_the_machine() -> None:
    for word in words(300, 5):
        x = Fraction(word, 2 ** (word % 90))
        assert rounded(x, FP64) == x.numerator / x.denominator
    assert rounded(Fraction(2) ** 128, FP32) == math.inf
