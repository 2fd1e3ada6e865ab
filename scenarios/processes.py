"""Ranks that are processes, started here or by torchrun and stopped together, or simulated."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, set_forkserver_preload
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.multiprocessing

from twinstep.parity.ranks.errors import RanksFailed
from twinstep.parity.ranks.world import Rank, World
from twinstep.scenarios.calls import engine
from twinstep.scenarios.ranks import Ranks

# Exit codes of a rank.
FAILED, REFUSED, LOST = 1, 2, 4
GRACE_S = 2.0
TORCH: Any = torch.multiprocessing  # exports without saying so
# Imported once, by the process that all ranks are forked from.
PRELOADED = ["twinstep.scenarios.cli", "torch._dynamo"]


@dataclass(frozen=True)
class Meeting:
    """A rank's number, how many there are, and the address where they meet."""

    number: int
    count: int
    url: str


class RankLost(RuntimeError):
    """A rank has died, or has waited too long for another."""

    exit_code = LOST


class RankRefused(ValueError):
    """A rank refuses the request."""


def started_by_torchrun() -> int:
    """Number of ranks that torchrun has started, this process one of them; 0 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 0


@contextmanager
def joined(side: str, seconds: float, meeting: Meeting | None = None) -> Iterator[Ranks]:
    """This process as a rank, for the length of the `with` block; rank 0 alone prints.

    The fast side communicates by NCCL where it runs on a GPU, everything else by gloo.

    A group that is still held after the block, if only by garbage, keeps threads of gloo. One that
    drops the last reference to a tensor while Python ends aborts the process ("terminate called
    without an active exception"). Whoever ends after the block lets go of all, and collects. The
    defaults of `torch.distributed.nn.functional` hold the group of all ranks if it is imported
    inside, which torch's optimizers do; so this module has imported it.

    Args:
        side: that trains.
        seconds: after which a collective is given up.
        meeting: of the ranks; None for torchrun's.

    Raises:
        RankLost: another rank has ended, or does not answer; or torchrun stops this one.
        RankRefused: the ranks cannot meet, or this one has no GPU of its own.
    """
    gpu = side == "fast" and engine().device.type == "cuda"
    if gpu:
        place = int(os.environ.get("LOCAL_RANK", "0")) if meeting is None else meeting.number
        if place >= torch.cuda.device_count():
            raise RankRefused(
                f"{torch.cuda.device_count()} GPUs, but should be one for each rank of a machine"
            )
        torch.cuda.set_device(place)
    backend, timeout = "cpu:gloo,cuda:nccl" if gpu else "gloo", timedelta(seconds=seconds)
    # By -1 torch knows that it is to look for torchrun's.
    url, count, at = (meeting.url, meeting.count, meeting.number) if meeting else (None, -1, -1)
    try:
        dist.init_process_group(backend, url, timeout, count, at)
    except (ValueError, dist.DistError) as problem:
        raise RankRefused(f"the ranks cannot meet: {in_short(problem)}") from problem
    except RuntimeError as problem:
        # Gloo's, where another rank has ended before this one was connected.
        raise RankLost(f"another rank does not answer: {in_short(problem)}") from problem
    number = dist.get_rank()
    heeds = nullcontext() if meeting else _heeding_torchrun()
    try:
        with open(os.devnull, "w") as none, redirect_stdout(none if number else sys.stdout), heeds:
            yield Ranks(number, dist.get_world_size(), dist.group.WORLD)
    except RuntimeError as problem:
        if isinstance(problem, dist.DistError) or "gloo" in str(problem):
            raise RankLost(f"another rank does not answer: {in_short(problem)}") from problem
        raise
    finally:
        dist.destroy_process_group()


@contextmanager
def _heeding_torchrun() -> Iterator[None]:
    """Raise where torchrun stops this rank, which it does once it has noticed that one is gone."""

    def stop(number: int, frame: object) -> None:
        raise RankLost("torchrun stops this rank, as it does when another is lost")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def simulate(count: int, seconds: float, train: Callable[[Ranks], None]) -> None:
    """Let threads of this process be the ranks, one at a time.

    Args:
        count: of ranks.
        seconds: after which a rank that comes no further is given up.
        train: what every rank does.

    Raises:
        Exception: that of a rank.
    """

    def one(rank: Rank) -> None:
        train(Ranks(rank.number, count, rank.group("data")))

    try:
        World(count, patience=seconds).run(one)
    except RanksFailed as failed:
        raise failed.first() from failed


def launch(count: int, side: str, seconds: float, train: Callable[[Ranks], None]) -> None:
    """Start ranks on this machine, and wait for them; when one fails, the others are stopped.

    The ranks meet in a file, so that no port can be taken.

    Args:
        count: of ranks.
        side: that trains.
        seconds: after which a collective is given up.
        train: what every rank does; can be pickled.

    Raises:
        RankLost: a rank has died.
        RankRefused: a rank refuses the request.
    """
    set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        context = TORCH.start_processes(
            _rank, (count, side, seconds, train, folder), count, False, start_method="forkserver"
        )
        try:
            _watch(context.processes, Path(folder))
        finally:
            for process in context.processes:
                process.kill()
                process.join()


def _rank(
    number: int, count: int, side: str, seconds: float, train: Callable[[Ranks], None], folder: str
) -> None:
    """A rank's process; its error is left in a file for the process that has started it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    meeting = Meeting(number, count, f"file://{folder}/meeting")
    try:
        with joined(side, seconds, meeting) as ranks:
            train(ranks)
    except (RankLost, RankRefused) as problem:
        (Path(folder) / str(number)).write_text(str(problem))
        sys.exit(LOST if isinstance(problem, RankLost) else REFUSED)
    except Exception:
        (Path(folder) / str(number)).write_text(traceback.format_exc())
        sys.exit(FAILED)


def _watch(processes: Sequence[BaseProcess], folder: Path) -> None:
    """Wait until all ranks have ended well, or one has not."""
    running = {process.sentinel: number for number, process in enumerate(processes)}
    bad: dict[int, int] = {}
    # The first that fails may only have lost the one that is the cause.
    while running and (ended := connection.wait(list(running), GRACE_S if bad else None)):
        for sentinel in ended:
            number = running.pop(cast(int, sentinel))
            processes[number].join()
            if code := processes[number].exitcode:
                bad[number] = code
    if not bad:
        return
    # A signal first, a rank that has lost another last.
    number = min(bad, key=lambda number: (bad[number] > 0, bad[number], number))
    if bad[number] < 0:
        name = signal.Signals(-bad[number]).name
        raise RankLost(f"rank {number} was ended by {name}, and the others were stopped")
    sentence = (folder / str(number)).read_text()
    if bad[number] == FAILED:
        print(sentence, file=sys.stderr)
        raise RankLost(f"rank {number} has failed with the error above; the others were stopped")
    raise (
        RankRefused(sentence) if bad[number] == REFUSED else RankLost(f"rank {number}: {sentence}")
    )


def in_short(problem: Exception) -> str:
    """An error of torch.distributed without the line of C++ before it and the advice after it."""
    sentence, _, _ = re.sub(r"^\[\S+\] ", "", str(problem)).partition(". This is typically")
    return sentence.partition("\n")[0]
