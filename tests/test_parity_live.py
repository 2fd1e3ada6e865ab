"""Laws of the live comparison: it runs the same thing twice, and it can say no."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from parity.peers.live import disagreement, norm_bound
from parity.peers.live_config import KINDS, Config, drawn
from parity.peers.live_run import Seen, ours, run
from parity.peers.record import live
from reference.compat import Compat

SEEDS = range(12)


def seen(config: Config, compat: Compat) -> list[Seen]:
    return run(config, partial(ours, compat=compat))


def test_configurations_are_the_same_every_time_and_cover_what_they_should() -> None:
    configs = [drawn(seed) for seed in range(60)]
    assert configs == [drawn(seed) for seed in range(60)]
    assert {config.kind for config in configs} == set(KINDS)
    assert {config.clips for config in configs} == {True, False}
    assert {config.dynamic for config in configs} == {True, False}
    assert {config.micro_batches for config in configs} == {1, 2, 3}
    assert {len(config.shapes) for config in configs} == {1, 2, 3}
    assert sum("o" in config.events for config in configs) > 50
    assert any("z" in config.events for config in configs)


def test_a_run_agrees_with_itself() -> None:
    for seed in SEEDS:
        config = drawn(seed, steps=6)
        once, again = (seen(config, Compat.deepspeed()) for _ in range(2))
        assert disagreement(config, once, again) == (0.0, 0.0, [])


def test_a_step_that_halves_the_gradient_is_seen() -> None:
    config = replace(drawn(0, steps=8), static_scale=0.0, scale_window=1, events="g" * 8)
    once = seen(config, Compat.deepspeed())
    other = seen(config, replace(Compat.deepspeed(), unscale_with_updated_scale=False))
    _, _, wrong = disagreement(config, once, other)
    assert len(wrong) == 1
    assert "configuration 0 (flat), step" in wrong[0]


def test_each_thing_that_is_compared_can_disagree() -> None:
    config = drawn(0, steps=4)
    base = seen(config, Compat.deepspeed())
    assert base[0].norm is not None
    changes = {
        "scale": {"scale": base[0].scale * 2},
        "skipped True": {"skipped": not base[0].skipped},
        "norm": {"norm": base[0].norm * (1 + 3 * norm_bound(base[0].weights.numel()))},
        "masters": {"masters": torch.nextafter(base[0].masters, base[0].masters + 1)},
    }
    for what, change in changes.items():
        other = [replace(base[0], **change), *base[1:]]  # type: ignore[arg-type]
        _, _, wrong = disagreement(config, other, base)
        assert len(wrong) == 1, what
        assert what in wrong[0]


def test_the_record_shows_agreement() -> None:
    record = live()
    assert record.wrong == []
    assert record.exact + record.within == sum(record.kinds.values())
    assert set(record.kinds) == set(KINDS)
    assert 0.0 < record.worst_norm <= 1.0
    assert 0.0 < record.worst_weight <= 1.0
    assert record.skipped > 0
