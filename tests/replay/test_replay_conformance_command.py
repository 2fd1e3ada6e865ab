"""The command `parity replay-conformance`: its table, its JSON, its exit codes."""

from __future__ import annotations

import json
import subprocess
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import triton

from tests.helpers.command import parity
from tests.helpers.profile import LONG
from twinstep.replay.conformance import report, suite
from twinstep.replay.conformance.probe import Probe, Result
from twinstep.replay.conformance.run import Row, near
from twinstep.replay.isa.forms import supported
from twinstep.replay.spec.floats import encode, signed

NVIDIA = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def test_forms_that_conform_end_in_0_and_are_written(tmp_path: Path) -> None:
    file = tmp_path / "forms.json"
    assert (
        parity(
            "replay-conformance", "--opcode", "brev", "--opcode", "bar.sync", "--json", str(file)
        )
        == 0
    )
    forms = json.loads(file.read_text())["forms"]
    assert [form["form"] for form in forms] == ["bar.sync", "brev.b32", "brev.b64"]
    assert all(form["cases"] > 0 and form["mismatches"] == 0 for form in forms)


def test_a_form_that_differs_ends_in_1_with_its_bits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Row("brev.b32", 4, 1, "of 0x1: 0x2, should be 0x80000000")
    monkeypatch.setattr(report, "rows", lambda *given: {"brev.b32": row})
    assert parity("replay-conformance", "--opcode", "brev.b32") == 1
    printed = capsys.readouterr().out
    assert "of 0x1: 0x2, should be 0x80000000" in printed
    assert "1 of 1 opcode forms differ on replay" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--opcode", "wgmma"), 'replay supports no opcode "wgmma"'),
        (("--engine", "tpu"), 'engine "tpu" has no conformance suite'),
    ],
)
def test_wrong_usage_ends_in_2(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parity("replay-conformance", *arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_cuda_ends_in_4(capsys: pytest.CaptureFixture[str]) -> None:
    assert parity("replay-conformance", "--engine", "cuda") == 4
    assert "no CUDA GPU here" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_gpu_conforms() -> None:
    assert parity("replay-conformance", "--engine", "cuda") == 0


def test_an_untested_triton_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(triton, "__version__", "2.1.0")
    assert parity("replay-conformance", "--opcode", "brev") == 2
    assert "Triton is 2.1.0, but replay was tested with 3.6 to 3.9" in capsys.readouterr().err


def bits(value: float) -> int:
    return encode(signed(Fraction(value), False), "f32")


def test_hardware_may_be_off_by_what_is_documented_and_not_more() -> None:
    sine = Result("sin.approx.ftz.f32", "f32", [], True)
    right = bits(0.5)
    assert near(sine, bits(1.0), right + 8, right)  # 2^-21.0
    assert not near(sine, bits(1.0), right + 16, right)
    assert near(sine, bits(20.0), right + 512, right)  # a wider range, a wider error
    assert not near(sine, bits(1.0), 0x7F800000, right)
    quotient = Result("div.full.f32", "f32", [], True)
    assert near(quotient, bits(3.0), right + 2, right)
    assert not near(quotient, bits(3.0), right + 3, right)
    pair = Result("tanh.approx.f16x2", "f16x2", [], True)
    assert near(pair, 0x3C003C00, 0x3A183A18, 0x3A183A17)
    assert not near(pair, 0x3C003C00, 0x3A303A17, 0x3A173A17)


@pytest.fixture(scope="module")
def older() -> list[Probe]:
    return list(suite.probes(capability=90))


def test_forms_of_the_newest_gpus_are_known(older: list[Probe]) -> None:
    newest = [form for form in supported() if suite.needs(form) == 100]
    assert {"add.rn.f32x2", "ld.global.v8.b32", "redux.sync.min.f32"} <= set(newest)
    assert not {"cvt.f32.f16", "set.eq.f32.f16", "atom.global.add.v4.f32"} & set(newest)
    assert not {form for probe in older for form in probe.forms} & set(newest)


def test_the_vendors_assembler_accepts_the_probes(older: list[Probe], tmp_path: Path) -> None:
    assembler = NVIDIA / "ptxas-blackwell"
    if not assembler.exists():
        assembler = NVIDIA / "ptxas"
    for number, probe in enumerate(older if LONG else older[::24]):
        file = tmp_path / f"{number}.ptx"
        file.write_text(probe.text("8.8", "sm_90a"))
        command = [str(assembler), "-arch=sm_90a", "-O0", str(file), "-o", str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[:500]
