"""`parity bench run` from start to end at a small size, and what is done with its results."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from twinstep.benchmarks.bench import main, registered
from twinstep.benchmarks.beside.subject import Shape
from twinstep.benchmarks.runs import results
from twinstep.benchmarks.runs.history import record
from twinstep.benchmarks.runs.picture import curve, furthest, moved
from twinstep.parity.records.errors import UsageError

KERNEL = """
from twinstep.parity import register


@register("accumulate", name="plain", dtypes=("bf16",))
def plain(accumulators, grads):
    for total, grad in zip(accumulators, grads, strict=True):
        total.add_(grad)
"""


def test_a_curve_is_of_one_combination() -> None:
    table, once, _ = results.chosen_groups(registered(""), results.CURVES, True)
    for operation in results.CURVES:
        own = [group for group in (*table, *once) if group.operation == operation]
        assert len({group.dtype for group in once if group.operation == operation}) == 1
        rows = [{"operation": g.operation, "dtype": g.dtype, **vars(g.shape)} for g in own]
        for kind in ("sizes", "tensors"):
            assert len({row["dtype"] for row in curve({"groups": rows}, operation, kind)}) == 1


def test_a_users_kernel_gets_its_rows_by_being_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    monkeypatch.setattr(results, "SHAPES", (Shape(1, 2000), Shape(3, 100)))
    file, found = tmp_path / "mine.py", tmp_path / "found.json"
    file.write_text(KERNEL)
    outputs = ["--json", str(found), "--export", str(tmp_path / "export.json"), "--picture"]
    outputs += [str(tmp_path / "run.png"), "--record", str(tmp_path / "history")]
    assert main(["run", str(file), "--processes", "2", "--rounds", "3", *outputs]) == 0
    said = capfd.readouterr().out
    for row in ("plain", "plain (A/A)", "torch foreach", "torch loop"):
        assert row in said
    document = json.loads(found.read_text())
    assert [(g["tensors"], g["each"], g["bytes"]) for g in document["groups"]] == [
        (1, 2000, 20_000),
        (3, 100, 3_000),
    ]
    for group in document["groups"]:
        for row in group["rows"]:
            low, middle, high = row["times_ours"]
            assert low <= middle <= high
    assert len(json.loads((tmp_path / "export.json").read_text())) == 4
    assert (tmp_path / "run.png").stat().st_size > 10_000
    (history,) = (tmp_path / "history").iterdir()
    trend = ["trend", str(history), str(tmp_path / "trend.png")]
    assert main(trend) == 3
    assert "not drawn, since a trend needs two runs: 1 of" in capfd.readouterr().out
    record(document, history.parent)
    assert main(trend) == 0
    assert (tmp_path / "trend.png").stat().st_size > 10_000

    capfd.readouterr()
    assert main(["compare", str(found), str(found)]) == 0
    assert "1.00" in capfd.readouterr().out
    document["key"]["torch"] = "1.0"
    (tmp_path / "old.json").write_text(json.dumps(document))
    assert main(["compare", str(tmp_path / "old.json"), str(found)]) == 3
    assert "cannot be compared: torch was 1.0, is" in capfd.readouterr().out


def test_a_trend_is_of_every_row_over_its_first_run_and_names_what_moved_most() -> None:
    def run(**ms: float) -> results.Document:
        rows = {f"{name}: norm": {"family": "ours", "ms": value} for name, value in ms.items()}
        control = {"family": "ours", "ms": 9.0}
        return {"rows": {**rows, "a again: norm": control, "b: norm": {"family": "peer", "ms": 1}}}

    found = moved([run(a=2.0), run(a=1.0, c=4.0), run(a=3.0, c=2.0)], "ours")
    assert found == {"a: norm": [(0, 1.0), (1, 0.5), (2, 1.5)], "c: norm": [(1, 1.0), (2, 0.5)]}
    assert furthest(found).splitlines()[1:] == ["0.50  c: norm", "1.50  a: norm"]


def test_a_file_that_is_no_result_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(UsageError, match="is no results file"):
        main(["compare", str(tmp_path / "x.json"), str(tmp_path / "x.json")])
    with pytest.raises(UsageError, match="git diff: .*no-such-revision"):
        main(["gate", "--baseline", "no-such-revision"])


def test_a_checkout_is_not_compared_with_itself(tmp_path: Path) -> None:
    for words in (["init", "-q"], ["add", "mine.py"], ["commit", "-q", "-m", "mine"]):
        (tmp_path / "mine.py").write_text("")
        author = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *author, *words], cwd=tmp_path, check=True)
    with pytest.raises(UsageError, match=r"nothing in .* differs from HEAD; name an older one"):
        main(["gate", str(tmp_path / "mine.py")])
