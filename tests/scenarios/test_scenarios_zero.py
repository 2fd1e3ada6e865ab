"""Training with ZeRO: the same bits on any number of ranks, also after one of them was killed."""

from __future__ import annotations

import gc
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.processes import gloo_threads
from tests.helpers.profile import LONG
from tests.helpers.waiting import output_of, wait_for
from twinstep import scenarios
from twinstep.parity.ranks.world import Rank, World
from twinstep.parity.registry.engines import engine_named
from twinstep.scenarios import calls, train
from twinstep.scenarios.model import Shape
from twinstep.scenarios.plan import DTYPES, ZERO, Plan
from twinstep.scenarios.processes import RankLost, joined
from twinstep.scenarios.ranks import UNIT, Ranks, exact_addend
from twinstep.scenarios.trace import Trace, first_difference

TINY = Shape(context=8, width=6, layers=1)
needs_gloo = pytest.mark.skipif(
    not dist.is_gloo_available(), reason="this torch was built without gloo"
)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "engine", lambda **_: engine_named("replay"))


def plan(optimizer: str, dtype: str, **more: object) -> Plan:
    words = {"steps": 6, "accumulate": 4, "scale_window": 2, "held_out": 1, "shape": TINY}
    words |= {"optimizer": optimizer, "dtype": dtype, "exact_sums": optimizer in ZERO}
    return Plan(**{**words, **more})  # type: ignore[arg-type]


def over(count: int, side: str, asked: Plan, **files: Path | int) -> list[Trace]:
    """The run of every simulated rank."""

    def one(rank: Rank) -> Trace:
        ranks = Ranks(rank.number, count, rank.group("data"))
        return train.run(side, asked, ranks=ranks, **files)  # type: ignore[arg-type]

    with train.one_thread():
        return World(count, seed=count, order="ring").run(one)


@pytest.mark.parametrize(
    ("dtype", "two", "four"),
    [
        ("fp16", "fast", "reference"),
        ("bf16", "reference", "fast"),
        ("fp32", "reference", "reference"),
    ],
)
def test_sums_that_are_exact_give_the_same_run_on_any_number_of_ranks(
    dtype: str, two: str, four: str
) -> None:
    """Sides of two ranks with two micro-batches each, and of four; either stage."""
    alone = train.run("reference", plan("zero1", dtype))
    assert bool(alone.skipped) == (dtype == "fp16")
    assert len(alone.skipped) < len(alone.records)
    for optimizer, side, count in [("zero2", two, 2), ("zero1", four, 4)]:
        for trace in over(count, side, plan(optimizer, dtype)):
            assert first_difference(alone, trace) is None
            assert trace.held_out == alone.held_out
            assert trace.header.ranks == count


def test_without_exact_sums_the_number_of_ranks_shows() -> None:
    asked = plan("zero2", "bf16", exact_sums=False, steps=2)
    found = [over(count, "reference", asked)[0] for count in (1, 2, 4)]
    for one, other in itertools.combinations(found, 2):
        assert first_difference(one, other) is not None


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("optimizer", ZERO)
def test_one_rank_with_one_micro_batch_is_the_run_of_the_unsharded_class(
    optimizer: str, dtype: str
) -> None:
    rest = {"accumulate": 1, "exact_sums": False, "rule": "dynamic"}
    unsharded = train.run("reference", plan("adam", dtype, **rest))
    sharded = train.run("fast", plan(optimizer, dtype, **rest))
    columns = ("loss", "lr", "scale", "skipped")
    assert [unsharded.column(name) for name in columns] == [sharded.column(n) for n in columns]
    assert unsharded.held_out == sharded.held_out


def test_a_run_goes_on_with_other_ranks_and_sides(tmp_path: Path) -> None:
    asked, saved = plan("zero2", "fp16"), tmp_path / "run.pt"
    whole = train.run("reference", asked)
    over(2, "fast", asked, stop=2, save=saved)
    over(4, "reference", asked, resume=saved, stop=4, save=saved)
    assert first_difference(whole, train.run("fast", asked, resume=saved)) is None


def test_checkpoints_on_the_way_are_those_of_a_run_that_stops_there(tmp_path: Path) -> None:
    asked = plan("zero1", "bf16", steps=5)
    seen = []

    def copied(record: object) -> None:
        seen.append((tmp_path / "run.pt").exists())

    train.run("reference", asked, copied, save=tmp_path / "run.pt", every=2)
    assert seen == [False, False, True, True, True]
    last = torch.load(tmp_path / "run.pt", weights_only=True)
    assert last["learner"]["step"] == 5


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_exact_addends_have_one_sum_in_any_order(dtype: torch.dtype) -> None:
    scale, parts = 2.0**9, 3
    drawn = torch.randn(parts, 4000, generator=torch.Generator().manual_seed(1)) * 8 * scale
    drawn[0, :4] = torch.tensor([1e-3, 0.4999, 6e4, 3.0])
    rows = [exact_addend(row.to(dtype), scale, parts) for row in drawn]
    whole = torch.stack([row.double() for row in rows]).sum(0)
    assert bool((whole / (UNIT * scale) == (whole / (UNIT * scale)).round()).all())
    for order in itertools.permutations(rows):
        total = torch.zeros(4000)
        for row in order:
            total += row.float()
        assert torch.equal(total.double(), whole)
    near = drawn[1].to(dtype)
    inside = near.abs() < 4 * scale  # the largest magnitude for three parts
    assert bool(inside.any())
    assert float((rows[1] - near)[inside].abs().max()) <= UNIT * scale / 2
    assert bool((rows[1][near.abs() > 4 * scale].abs() == 4 * scale).all())


def test_offload_does_not_change_the_run() -> None:
    found = [train.run("fast", plan("zero1", "bf16", offload=o, steps=3)) for o in (False, True)]
    assert first_difference(*found) is None


def test_what_is_not_finite_stays() -> None:
    grad = torch.tensor([math.inf, -math.inf, math.nan])
    assert str(exact_addend(grad, 1.0, 2)) == str(grad)


def set_up_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a torchrun that has started one rank."""
    found = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in found.items():
        monkeypatch.setenv(name, value)


@needs_gloo
@pytest.mark.parametrize(("more", "code"), [(["--steps", "1"], 0), (["--resume", "absent"], 2)])
def test_a_rank_of_torchrun_leaves_no_thread_of_gloo(
    more: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up_alone(monkeypatch)
    gc.collect()
    before = gloo_threads()  # torch keeps those of a DeviceMesh
    command = ["train", "--optimizer", "zero2", "--dtype", "bf16", "--side", "fast", *more]
    assert scenarios.main(command) == code
    assert gloo_threads() <= before


def is_stopped() -> None:
    with joined("reference", 30.0):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30.0)


@needs_gloo
def test_a_rank_that_torchrun_stops_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up_alone(monkeypatch)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RankLost, match="torchrun stops this rank"):
        is_stopped()
    assert signal.getsignal(signal.SIGTERM) is before


def ranks_of(torchrun: int) -> dict[int, int]:
    """Processes that a torchrun has started, by rank."""
    found = {}
    for child in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split():
        for entry in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                found[int(entry.partition(b"=")[2])] = int(child)
    return found


@needs_gloo
@pytest.mark.skipif(sys.platform != "linux", reason="children are found in /proc")
def test_a_run_whose_rank_was_killed_ends_on_one_and_on_four_ranks_with_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["train", "--optimizer", "zero2", "--dtype", "bf16", "--accumulate", "4", "--exact-sums"]
    run += ["--steps", "40"]
    saved = tmp_path / "run.pt"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    scenario = ["-m", "twinstep.scenarios", *run, "--timeout", "60"]
    two = [*torchrun, "2", *scenario, "--save", str(saved), "--save-every", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(two, stderr=subprocess.PIPE, text=True, env=environment) as begun:
        wait_for("a checkpoint", lambda: saved.exists() or begun.poll() is not None)
        if begun.poll() is None:
            os.kill(ranks_of(begun.pid)[1], signal.SIGKILL)
        _, printed = output_of(begun)
    assert begun.returncode == 1, printed
    said = "".join(line for line in printed.splitlines() if line.startswith("scenarios train: "))
    assert "another rank does not answer" in said or "torchrun stops this rank" in said, printed
    reached = torch.load(saved, weights_only=True)["learner"]["step"]
    assert reached < 40
    run += ["--stop", str(reached + 2)]
    files = {name: str(tmp_path / name) for name in ("whole", "one", "four")}
    resumed = [*run, "--resume", str(saved), "--out"]
    assert scenarios.main([*run, "--out", files["whole"]]) == 0
    assert scenarios.main([*resumed, files["one"], "--side", "fast"]) == 0
    if LONG:
        four = [*torchrun, "4", "-m", "twinstep.scenarios", *resumed, files["four"]]
        subprocess.run(four, check=True, env=environment)
    else:
        assert scenarios.main([*resumed, files["four"], "--ranks", "4", "--simulated"]) == 0
    for name in ("one", "four"):
        assert scenarios.main(["compare", files["whole"], files[name]]) == 0
    assert capsys.readouterr().out.count("equal: every step of 1 run") == 2
