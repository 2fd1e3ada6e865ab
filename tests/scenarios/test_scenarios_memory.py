"""Memory of a rank of ZeRO: the formula, the optimizer's own report, and what is counted."""

from __future__ import annotations

import pytest
import torch

from twinstep import scenarios
from twinstep.parity.registry.engines import engine_named
from twinstep.scenarios import calls, memory
from twinstep.scenarios.memory import LIMIT, Counted, Found, Sizes, apart, measured


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "engine", lambda **_: engine_named("replay"))


@pytest.mark.parametrize(("ranks", "stage"), [(1, 1), (1, 2), (3, 2)])
def test_a_rank_keeps_what_the_formula_says_within_a_hundredth(ranks: int, stage: int) -> None:
    sizes = Sizes(parameters=60_005, ranks=ranks, stage=stage, bucket=12_000)
    found = measured(sizes)
    assert apart(sizes, found) <= LIMIT
    for one in found:
        for kind, size in sizes.kept.items():
            # Counters of steps, and the first piece, which is a little longer.
            assert abs(one.told[kind] - size) <= 64, kind
        if ranks == 1:
            wanted = sum(sizes.kept.values()) + sizes.gradients
            assert abs(one.most / wanted - 1.0) <= LIMIT


def test_what_is_made_is_counted_until_it_is_gone() -> None:
    with Counted() as counted:
        kept = torch.zeros(100, dtype=torch.float32)
        view = kept[10:].view(3, 30)
        assert counted.bytes == 400
        more = kept.double() + 1.0
        assert counted.bytes == 400 + 800
        del more, kept
        assert counted.bytes == 400  # the view holds it
        del view
        assert counted.bytes == 0
    assert counted.most == 400 + 2 * 800


@pytest.mark.parametrize(("share", "code"), [(1.0, 0), (1.009, 0), (1.011, 1), (0.989, 1)])
def test_the_command_fails_where_formula_and_count_differ(
    share: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(sizes: Sizes) -> list[Found]:
        kept = sum(sizes.kept.values())
        return [Found(told={}, kept=kept, most=0), Found(told={}, kept=int(kept * share), most=0)]

    monkeypatch.setattr(memory, "measured", found)
    assert scenarios.main(["memory", "--parameters", "1", "5", "--optimizer", "zero1"]) == code
    assert len(capsys.readouterr().out.splitlines()) == 2 + 2 * 4
