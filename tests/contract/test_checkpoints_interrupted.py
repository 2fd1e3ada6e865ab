"""A save that is interrupted loses no checkpoint: the old one or the new one is there, whole."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoint_runs import plain, started
from tests.helpers.power import Disk, cut, full
from twinstep.contract.checkpoint import read_checkpoint, write_checkpoint
from twinstep.contract.moments import StateDict

POINTS, KILLED = 500, 12  # every twelfth is a process that is killed
Writer = Callable[[Path, StateDict], None]


def contents(version: int) -> StateDict:
    """A small state dict of this version; its length varies with it."""
    return {"version": version, "weights": [torch.full((40 + version % 9,), float(version))] * 2}


def whole(path: Path) -> int:
    """The version that can be read, with all its values."""
    saved = read_checkpoint(path)
    version = saved["version"]
    assert isinstance(version, int)
    assert plain(saved) == plain(contents(version))
    return version


def calls_of(write: Writer, path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of one save that change the folder."""
    disk = Disk(0, full)
    with monkeypatch.context() as patch:
        disk.patch(patch.setattr)
        write(path, contents(0))
    return disk.calls


def test_power_that_fails_anywhere_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, dice = tmp_path / "state.pt", random.Random(7)
    write_checkpoint(path, contents(0))
    calls = calls_of(write_checkpoint, path, monkeypatch)
    assert calls[0] == "open"
    assert calls[-3:] == ["fsync", "replace", "fsync"]
    assert calls.count("write") > 3
    found, old, new = 0, 0, 0
    for point in range(POINTS):
        at = dice.randint(1, len(calls) + 1)
        save = partial(write_checkpoint, path, contents(point + 1))
        ended = cut(save, at, seed=point, kill=point % KILLED == 0)
        assert ended == (at > len(calls))
        version = whole(path)
        assert version in ([point + 1] if ended else [found, point + 1]), (point, at)
        # Before the rename nothing of the new one can be there.
        assert version == found or at >= len(calls)
        old, new = old + (version == found), new + (version != found)
        found = version
    assert min(old, new) > POINTS // 20
    left = [file.name for file in tmp_path.iterdir() if file != path]
    assert all(name.startswith(".state.pt.") and name.endswith(".partial") for name in left)


def in_place(path: Path, saved: StateDict) -> None:
    """The way of `torch.save(saved, path)`: no file is whole while it is written."""
    with open(path, "wb") as file:
        torch.save(saved, file)


def beside(path: Path, saved: StateDict) -> None:
    """A rename of what may never reach the disk."""
    in_place(path.with_suffix(".new"), saved)
    os.replace(path.with_suffix(".new"), path)


@pytest.mark.parametrize("wrong", [in_place, beside])
def test_a_writer_that_loses_checkpoints_is_noticed(
    wrong: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lost = tmp_path / "state.pt", 0
    calls = calls_of(wrong, path, monkeypatch)
    for at, seed in product(range(1, len(calls) + 2), range(4)):
        in_place(path, contents(1))
        cut(partial(_and_wait, wrong, path), at, seed)
        try:
            whole(path)
        except ValueError:
            lost += 1
    assert lost


def _and_wait(write: Writer, path: Path) -> None:
    """Power fails some time after a save, too."""
    write(path, contents(2))
    with open(path.with_name("later"), "wb"):
        pass


def test_a_disk_without_room_leaves_the_old_one_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.pt"
    write_checkpoint(path, contents(1))
    calls = calls_of(write_checkpoint, tmp_path / "other.pt", monkeypatch)
    for at in range(1, calls.index("replace") + 2):
        with monkeypatch.context() as patch:
            Disk(at, full).patch(patch.setattr)
            with pytest.raises((OSError, RuntimeError)):
                write_checkpoint(path, contents(2))
        assert whole(path) == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other.pt", "state.pt"]


def test_a_state_dict_is_written_as_torch_does(tmp_path: Path) -> None:
    """The same file with the usual permissions; a link is followed."""
    run = started("reference", "flat")
    run.train(range(1))
    state = run.optimizer.state_dict()
    real, link, other = tmp_path / "step1.pt", tmp_path / "latest.pt", tmp_path / "torch.pt"
    link.symlink_to(real)
    write_checkpoint(link, state)
    torch.save(state, other)
    assert link.is_symlink()
    assert plain(read_checkpoint(real)) == plain(read_checkpoint(other)) == plain(state)
    assert real.stat().st_mode == other.stat().st_mode


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_checkpoint(tmp_path / "none" / "state.pt", {})
