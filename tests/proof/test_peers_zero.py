"""Laws of the live comparison of ZeRO: it covers the options, and it can say no."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from twinstep.contract.compat import Compat
from twinstep.parity.proof.peers.live import disagreement
from twinstep.parity.proof.peers.live_run import Seen
from twinstep.parity.proof.peers.record import recorded_zero
from twinstep.parity.proof.peers.wire import SHARES, Wire
from twinstep.parity.proof.peers.zero_config import ZeroConfig, drawn
from twinstep.parity.proof.peers.zero_ledger import LEDGER, without_differences
from twinstep.parity.proof.peers.zero_live import CONFIGURATIONS, STEPS, summed
from twinstep.parity.proof.peers.zero_ranks import Judged
from twinstep.parity.proof.peers.zero_run import ours, run
from twinstep.parity.proof.peers.zero_volume import Volume, theory, volume_faults
from twinstep.parity.ranks.world import World

CONFIGS = [drawn(seed, STEPS) for seed in range(CONFIGURATIONS)]
BOTH = ("world", "stage", "dtype", "contiguous", "overlaps", "dealt", "scatters", "postscales")


def test_configurations_are_the_same_every_time_and_cover_the_options() -> None:
    assert [drawn(seed, STEPS) for seed in range(CONFIGURATIONS)] == CONFIGS
    for option in (*BOTH, "multi_rank", "refills", "checks", "clips", "dynamic"):
        assert len({getattr(config, option) for config in CONFIGS}) == 2, option
    assert {config.sums for config in CONFIGS} == {"fp16", "bf16", "fp32"}
    assert {config.wire for config in CONFIGS} == {"fp16", "bf16", "fp32"}
    assert {config.micro_batches for config in CONFIGS} == {1, 2, 3}
    assert {config.predivides for config in CONFIGS} == {1.0, 2.0, 3.0}
    assert {len(config.shapes) for config in CONFIGS} == {1, 2, 3}
    assert {event for config in CONFIGS for event in config.events} == set("gotz")
    assert {config.idle for config in CONFIGS} == {-1, 0}
    assert len({config.bucket for config in CONFIGS}) == 5


def test_the_record_shows_agreement_and_every_difference() -> None:
    record = recorded_zero()
    assert record.wrong == []
    assert sum(record.kinds.values()) == CONFIGURATIONS
    assert record.exact + record.within >= CONFIGURATIONS - sum(record.applies.values())
    assert record.exact > CONFIGURATIONS // 2
    assert record.within > 0
    assert 0.0 < record.worst_norm <= 1.0
    assert 0.0 < record.worst_weight <= 1.0
    assert record.applies == {row.name: sum(map(row.applies, CONFIGS)) for row in LEDGER}
    assert all(record.shows.values())
    assert 0 < record.default_differs < CONFIGURATIONS
    assert volume_faults(record.volumes) == []
    assert {row.who for row in record.volumes} == {"ours", "DeepSpeed", "DeepSpeed, to one rank"}


def judged(config: ZeroConfig, **values: Any) -> Judged:
    return Judged(config.seed, **{"steps": STEPS, "wrong": {"fast": [], "reference": []}, **values})


def test_a_difference_without_a_row_a_row_that_does_not_show_and_a_lone_default_are_reported() -> (
    None
):
    plain = next(c for c in CONFIGS if not c.dynamic and not any(r.applies(c) for r in LEDGER))
    found = summed([plain], [judged(plain)])
    assert len(found.wrong) == len(LEDGER)
    assert "no configuration shows any longer that gradients are divided before" in found.wrong[0]
    assert (found.exact, found.within) == (1, 0)
    wrong = judged(plain, wrong={"fast": ["masters are apart"], "reference": []})
    found = summed([plain], [judged(plain), wrong])
    assert found.wrong[0] == "ZeRO, fast, masters are apart"
    assert (found.exact, found.within) == (0, 0)
    found = summed([plain], [judged(plain, default_differs=True)])
    assert "our default differs without a scale" in found.wrong[0]


def test_a_row_explains_its_own_configurations_alone() -> None:
    for row in LEDGER:
        config = next(filter(row.applies, CONFIGS))
        apart = judged(config, wrong={"fast": ["masters are apart"]})
        found = summed([config], [apart])
        assert found.shows[row.name] == 1
        assert not any("masters are apart" in sentence for sentence in found.wrong)
        sibling = judged(config, wrong={"fast": ["masters are apart"]})
        found = summed([config], [replace(apart, sibling=sibling)])
        assert "ZeRO without known differences, fast, masters are apart" in found.wrong
        plain = without_differences(config)
        assert plain is not None
        assert without_differences(plain) is None
        alone = replace(config, world=1)
        assert not row.applies(alone)
        assert "ZeRO, fast, masters are apart" in summed([alone], [apart]).wrong


def runs(config: ZeroConfig, side: str, compat: Compat) -> list[list[Seen]]:
    """The run on all ranks, simulated."""
    return World(config.world).run(
        lambda rank: run(config, partial(ours, side=side, compat=compat))
    )


def test_a_side_agrees_with_itself_and_a_step_that_halves_the_gradient_is_seen() -> None:
    config = next(c for c in CONFIGS if c.dynamic and c.world == 2 and not c.clips)
    config = replace(config, events="gggg", scale_window=1, hysteresis=1)
    once, again = (runs(config, "reference", Compat.deepspeed()) for _ in range(2))
    assert [disagreement(config, *pair) for pair in zip(once, again, strict=True)] == [
        (0.0, 0.0, [])
    ] * 2
    default = runs(config, "reference", Compat())
    for pair in zip(once, default, strict=True):
        _, _, wrong = disagreement(config, *pair)
        assert "masters are" in wrong[0]


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> Wire:
    """A wire whose collectives do nothing."""

    def nothing(*args: object, **kwargs: object) -> None:
        del args, kwargs

    for name in SHARES:
        monkeypatch.setattr(dist, name, nothing, raising=False)
    wire = Wire()
    wire.install()
    return wire


def test_bytes_are_those_of_what_is_handed_in(collectives: Wire) -> None:
    half, whole = torch.zeros(4, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)
    calls: list[tuple[Callable[..., Any], tuple[Any, ...], float]] = [
        (dist.all_reduce, (whole,), 16.0),
        (dist.reduce, (whole, 0), 8.0),
        (dist.reduce_scatter_tensor, (half, whole), 8.0),
        (dist.all_gather_into_tensor, (whole, half), 8.0),
    ]
    for call, args, _ in calls:
        call(*args)
    assert collectives.calls == [(torch.bfloat16, size) for _, _, size in calls]
    collectives.calls.clear()
    dist.all_reduce(tensor=torch.zeros(3))
    assert collectives.calls == [(torch.float32, 12.0)]


def test_too_many_bytes_are_a_fault() -> None:
    volume = Volume(
        stage=2, micro_batches=3, who="ours", per_element=4.0, calls=1, rest=0.0, rest_calls=0
    )
    assert theory(2, 3) == 4.0
    assert theory(1, 3) == 2.0
    assert volume_faults([volume]) == []
    (sentence,) = volume_faults([replace(volume, stage=1)])
    assert "4.0 bytes for each parameter, but should be 2.0" in sentence
    assert volume_faults([replace(volume, who="DeepSpeed")]) == ["ZeRO: no bytes were counted"]
