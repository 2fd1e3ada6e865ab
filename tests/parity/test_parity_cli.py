"""The command: exit codes, one sentence for wrong usage, reports."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.helpers.command import parity, sentences

GOOD = """
from twinstep.parity import register

@register("accumulate", name="mine", dtypes=("bf16",))
def mine(accumulators, grads):
    for a, g in zip(accumulators, grads):
        a.add_(g.float())
"""
HEAD = "from twinstep.parity import register\n"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(text: str, name: str = "kernel.py") -> str:
    Path(name).write_text(text)
    return name


def test_a_right_kernel_is_0_and_the_table_names_every_law(capsys: Capture) -> None:
    assert parity("check", written(GOOD), "--quick") == 0
    out = capsys.readouterr().out
    assert "all laws kept in 11 cells" in out
    assert "mine" in out
    assert "\x1b" not in out


def test_the_first_verdict_is_told_with_its_time(capsys: Capture) -> None:
    assert parity("check", written(GOOD), "--quick", "--jobs", "1") == 0
    err = capsys.readouterr().err
    first = re.search(r"^first verdict after (\d+) s: mine bf16 value: passed$", err, re.MULTILINE)
    assert first is not None
    assert int(first[1]) <= 20


def test_a_file_in_the_place_of_the_repro_folder_is_wrong_usage(capsys: Capture) -> None:
    Path("parity_repros").touch()
    assert parity("check", written(GOOD)) == 2
    assert capsys.readouterr().err == (
        "parity: parity_repros is a file, but should be the folder of repro files, or free\n"
    )


def test_a_repro_folder_that_cannot_be_written_is_wrong_usage(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("parity_repros").mkdir()
    # Modes bind nobody who runs tests as root.
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "parity_repros")
    assert parity("check", written(GOOD)) == 2
    assert capsys.readouterr().err == (
        "parity: parity_repros should be a folder that repro files can be written to, but "
        "parity_repros cannot be\n"
    )


def test_a_wrong_kernel_is_1_with_failure_text_and_repro(capsys: Capture) -> None:
    assert parity("check", written(GOOD.replace("g.float()", "-g.float()")), "--quick") == 1
    out = capsys.readouterr().out
    assert "breaks `value`: accumulators[0][0] differs from the reference" in out
    repros = list(Path("parity_repros").glob("repro_*.py"))
    assert any(repro.name in out for repro in repros)
    assert out.count("breaks `") == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def x(:", "has a syntax error: invalid syntax"),
        ("import nothing_of_that_name", "cannot be imported: ModuleNotFoundError"),
        ("x = 1", "registers no kernel"),
        ("raise SystemExit(7)", "cannot be imported: SystemExit: 7"),
        (GOOD.replace('"accumulate"', '"acumulate"'), 'operation "acumulate" is unknown'),
        (GOOD.replace("mine(accumulators, grads)", "mine(grads)"), "not accumulators"),
        (GOOD.replace('("bf16",)', '("float8",)'), 'dtypes has "float8"'),
        (GOOD + GOOD[len(HEAD) :], 'kernel "mine" is registered already'),
    ],
)
def test_an_unreadable_file_is_2_in_one_sentence(text: str, says: str, capsys: Capture) -> None:
    assert parity("check", written(text)) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert len(sentences(captured.err)) == 1
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["check", "nowhere.py"], "nowhere.py does not exist"),
        (["check", "kernel.py", "--dtype", "float8"], '--dtype "float8" is unknown'),
        (
            ["run", "--dtype", "float8"],
            "among bf16, bf16-pure, fp16, fp16-pure, fp32, fp32-to-bf16, mixed, scalar",
        ),
        (["check", "kernel.py", "--law", "gravity"], '--law "gravity" is unknown'),
        (["check", "kernel.py", "--kernel", "yours"], '--kernel "yours" is unknown'),
        (["check", "kernel.py", "--op", "lion"], '--op "lion" is unknown'),
        (["check", "kernel.py", "--engine", "tpu"], 'engine "tpu" is unknown'),
        (["check", "kernel.py", "--examples", "0"], "examples"),
        (["check", "kernel.py", "--examples", "many"], "examples"),
        (["chek"], "chek"),
        (["run", "--nonsense"], "nonsense"),
    ],
)
def test_wrong_usage_is_2_in_one_sentence(argv: list[str], says: str, capsys: Capture) -> None:
    written(GOOD)
    assert parity(*argv) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a GPU here")
def test_a_missing_device_is_4(capsys: Capture) -> None:
    assert parity("check", written(GOOD), "--engine", "cuda") == 4
    assert "no CUDA GPU here" in capsys.readouterr().err


def test_nothing_judged_is_3(capsys: Capture) -> None:
    assert parity("check", written(GOOD), "--dtype", "fp16") == 3
    assert "nothing was judged" in capsys.readouterr().out


def test_json_and_junit_are_written(capsys: Capture) -> None:
    file = written(GOOD)
    assert parity("check", file, "--quick", "--json", "a/b.json", "--junitxml", "c.xml") == 0
    document = json.loads(Path("a/b.json").read_text())
    assert document["counts"]["passed"] == 11
    assert ElementTree.parse("c.xml").getroot().tag == "testsuites"


def test_json_on_standard_output_is_nothing_but_json(capsys: Capture) -> None:
    assert parity("check", written(GOOD), "--quick", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["exit_code"] == 0


def test_a_report_that_cannot_be_written_is_2(capsys: Capture) -> None:
    assert parity("check", written(GOOD), "--quick", "--json", "kernel.py/x.json") == 2
    assert "--json kernel.py/x.json cannot be written" in capsys.readouterr().err


def test_flushing_subnormals_while_importing_is_refused(capsys: Capture) -> None:
    import torch

    text = GOOD + "\nimport torch\ntorch.set_flush_denormal(True)\n"
    try:
        assert parity("check", written(text)) == 2
    finally:
        torch.set_flush_denormal(False)
    assert "flushed to zero after importing" in capsys.readouterr().err


def test_list_names_operations_laws_and_kernels(capsys: Capture) -> None:
    assert parity("list") == 0
    out = capsys.readouterr().out
    for word in ("mixed_step", "skipped_step", "triton.adamw_step", "fp32-to-bf16"):
        assert word in out


def test_doctor_names_engines_and_subnormals(capsys: Capture) -> None:
    assert parity("doctor") == 0
    out = capsys.readouterr().out
    for word in ("torch", "triton", "replay", "cpu: ready", "subnormals", "live"):
        assert word in out


def test_a_seed_is_a_number_or_drawn_and_the_verdict_names_it(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("check", written(GOOD), "--quick", "--law", "value")
    assert parity(*command, "--seed", "7") == 0
    assert "all laws kept in 1 cell with --seed 7 in " in capsys.readouterr().out
    monkeypatch.setenv("PARITY_SEED", "random")
    named = set()
    for _ in range(2):
        assert parity(*command, "--json", "out.json") == 0
        found = re.search(r"with --seed (\d+) in ", capsys.readouterr().out)
        assert found is not None
        named.add(found[1])
        assert json.loads(Path("out.json").read_text())["verdict"].endswith(found[1])
    assert len(named) == 2
    assert parity(*command, "--seed", "often") == 2
    assert 'should be a number from 0 on, or the word "random"' in capsys.readouterr().err


SCALER = """
from twinstep.parity import register_optimizer
from twinstep.reference.optimizers.scalers import StaticLossScale

@register_optimizer("mine", reference="StaticLossScale", arithmetic="exact", dtypes=("fp32",))
class Mine(StaticLossScale):
    pass
"""


def test_a_class_of_a_user_is_driven_through_150_sequences_and_more(capsys: Capture) -> None:
    file = written(SCALER)
    assert parity("check", file, "--json", "-") == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert max(cell.get("sequences", 0) for cell in cells) >= 150
