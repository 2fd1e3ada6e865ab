"""The corpus: the same bytes on every read, batches drawn from one generator only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from twinstep.scenarios import text


def test_text_is_the_same_on_every_read() -> None:
    first, second = text.load(), text.load()
    assert first.digest == second.digest
    assert torch.equal(first.train, second.train)


def test_text_is_real_python_source() -> None:
    loaded = text.load()
    assert loaded.train.numel() > 500_000
    assert b"def " in bytes(loaded.train[:10_000].tolist())
    assert set(loaded.modules) <= set(text.MODULES)


def test_held_out_text_follows_the_training_text() -> None:
    loaded = text.load()
    total = loaded.train.numel() + loaded.held_out.numel()
    assert loaded.train.numel() == total * 9 // 10


def test_a_module_is_found_as_file_or_package(tmp_path: Path) -> None:
    (tmp_path / "flat.py").write_text("1")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__init__.py").write_text("2")
    assert text.source_of("flat", tmp_path) == tmp_path / "flat.py"
    assert text.source_of("folder", tmp_path) == tmp_path / "folder" / "__init__.py"
    assert text.source_of("absent", tmp_path) is None


def test_digest_covers_every_byte(tmp_path: Path) -> None:
    for name in text.MODULES:
        (tmp_path / f"{name}.py").write_text(name)
    before = text.load(tmp_path).digest
    (tmp_path / f"{text.MODULES[-1]}.py").write_text("changed")
    assert text.load(tmp_path).digest != before


def test_a_python_without_source_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(text.TextMissing, match=r"^0 of \d+ standard library modules"):
        text.load(tmp_path)


def test_targets_are_inputs_moved_on_by_one() -> None:
    tokens = torch.arange(200, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(1)
    inputs, targets = text.batch(tokens, size=5, context=16, generator=generator)
    assert inputs.shape == (5, 16)
    assert torch.equal(inputs + 1, targets)


def test_batch_draws_from_its_own_generator_only() -> None:
    tokens = text.load().train
    before = torch.get_rng_state()
    drawn = [
        text.batch(tokens, size=2, context=8, generator=torch.Generator().manual_seed(seed))[0]
        for seed in (3, 3, 4)
    ]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_batch_reaches_the_last_byte_and_no_further() -> None:
    tokens = torch.arange(4, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    inputs, targets = text.batch(tokens, size=64, context=2, generator=generator)
    assert set(inputs[:, 0].tolist()) == {0, 1}
    assert int(targets.max()) == 3


def test_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="text has 8 bytes, but a window of 8 needs more"):
        text.batch(
            torch.zeros(8, dtype=torch.uint8), size=1, context=8, generator=torch.Generator()
        )
