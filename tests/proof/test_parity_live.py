"""Laws of the live comparison: it runs the same thing twice, and it can say no."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from twinstep.contract.compat import Compat
from twinstep.parity.proof.peers.differences import DIFFERENCES, evidence
from twinstep.parity.proof.peers.edge_list import ORDER
from twinstep.parity.proof.peers.edge_scene import Shown
from twinstep.parity.proof.peers.live import (
    Agreement,
    attribute,
    disagreement,
    norm_bound,
    selectable,
)
from twinstep.parity.proof.peers.live_config import KINDS, Config, drawn
from twinstep.parity.proof.peers.live_run import Seen, ours, run
from twinstep.parity.proof.peers.page import seen_where
from twinstep.parity.proof.peers.record import live

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
    assert {config.external_scale for config in configs} == {0.0, 8.0}
    assert {config.expert for config in configs} == {-1, 0}
    assert {config.reload for config in configs} == {-1, 1, 4}
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
    assert 0 < record.default_equal < sum(record.kinds.values())


def test_every_known_difference_has_evidence_and_every_field_is_one() -> None:
    fields = [row.field for row in DIFFERENCES if row.field]
    assert sorted(fields) == sorted(selectable())
    assert [row.theirs for row in DIFFERENCES if not seen_where(row)] == []
    assert all(row.scene in ORDER for row in DIFFERENCES if row.scene)


def test_a_difference_that_nothing_shows_has_no_evidence() -> None:
    row = replace(DIFFERENCES[0], field="")
    assert evidence(row, {}, {}, []) == ""
    same = Shown(edge=row.scene, upstream=[1.0], default=[1.0])
    assert evidence(row, {}, {}, [same]) == ""
    assert evidence(row, {}, {}, [replace(same, upstream=[0.5])]) == f"scene {row.scene}"


def test_fields_explain_what_the_default_changes_and_more_than_that_is_counted() -> None:
    config = replace(drawn(0, steps=8), static_scale=0.0, scale_window=1, events="g" * 8)
    upstream = seen(config, Compat.deepspeed())
    found = Agreement()
    attribute(found, config, upstream)
    assert found.together == 0
    assert found.default_differs
    assert found.visible["unscale_with_updated_scale"]
    halved = [replace(one, norm=1.5) for one in upstream]
    hidden = Agreement()
    attribute(hidden, config, halved)
    assert hidden.together == 1


def test_two_fields_can_hide_one_another() -> None:
    """An overridden scale that nobody divides out, and a norm that is reported with it."""
    found = Agreement()
    attribute(found, drawn(58), seen(drawn(58), Compat.deepspeed()))
    assert found.together == 1
    assert found.default_differs == {"norm": 1, "weights": 1}
    assert found.visible["report_scaled_norm"] == {}
