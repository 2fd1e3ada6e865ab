"""Ranks that are processes: drawn trainings on them, with the interface of simulated ranks.

    torchrun --nproc-per-node 2 -m tests.helpers.processes CASES FOLDER

reads the cases from a file and prints one line of JSON for each: results of all ranks. State
dicts are written to the folder. There are GPUs for all ranks: NCCL, and fast sides on them.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group, which its defaults would hold

from tests.helpers import zero_plans
from tests.helpers.plans import AXES, STEPS, Place, Plan, Training
from tests.helpers.waiting import LIMIT_S, limit_collectives
from tests.helpers.zero_plans import ZeroPlan
from twinstep.contract.checkpoint import read_checkpoint, write_checkpoint
from twinstep.parity.ranks.world import Rank
from twinstep.replay.triton.driver import activate

AnyPlan = Plan | ZeroPlan
AnyTraining = Training | zero_plans.Training
GROUPS: dict[tuple[int, ...], dist.ProcessGroup] = {}


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        plan: of it.
        side: that trains.
        resumed: side that resumes.
        at: step before which the state dicts are saved.
    """

    plan: AnyPlan
    side: str
    resumed: str
    at: int


class ProcessRank:
    """This process as a rank of a plan; `dist.init_process_group` has been called.

    Args:
        plan: of the training.
        seconds: after which a collective is given up.

    Attributes:
        number: in the world.
        place: along each axis.
    """

    def __init__(self, plan: AnyPlan, seconds: float) -> None:
        self.number, self._places = dist.get_rank(), plan.places
        self.place = self._places[self.number]
        # All ranks make all groups in the same order. A group does not inherit the time limit.
        limit = timedelta(seconds=seconds)
        for count in range(len(AXES) + 1):
            for axes in itertools.combinations(AXES, count):
                for place in self._places:
                    ranks = self._ranks(place, axes)
                    if ranks not in GROUPS:
                        GROUPS[ranks] = dist.new_group(ranks, timeout=limit)

    def _ranks(self, place: Place, axes: tuple[str, ...]) -> tuple[int, ...]:
        fixed = [axis for axis in AXES if axis not in axes]
        return tuple(
            number
            for number, other in enumerate(self._places)
            if all(other[axis] == place[axis] for axis in fixed)
        )

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The ranks that differ from this one along these axes alone."""
        return GROUPS[self._ranks(self.place, axes)]


def training_on(plan: AnyPlan, side: str, rank: Rank) -> AnyTraining:
    """A rank of a plan of either kind."""
    if isinstance(plan, ZeroPlan):
        return zero_plans.Training(plan, side, rank)
    return Training(plan, side, rank)


def training_of(plan: AnyPlan, side: str, seconds: float) -> AnyTraining:
    """This process's rank of a plan; a collective is given up after some seconds."""
    return training_on(plan, side, cast(Rank, ProcessRank(plan, seconds)))


def told(value: Any) -> Any:
    """A result as JSON has it, which is equal if and only if the result is."""
    if isinstance(value, dict):
        return {str(key): told(one) for key, one in value.items()}
    return [told(one) for one in value] if isinstance(value, list | tuple) else value


def seen(training: AnyTraining) -> Any:
    """Facts that ranks agree on, weights, masters and moments."""
    return told([training.agreed(), training.weights(), training.masters()])


def trained(training: AnyTraining, first: int = 0) -> list[Any]:
    """Observations after each step from one on."""
    found = []
    for step in range(first, STEPS):
        training.step(step)
        found.append(seen(training))
    return found


def saved_at(folder: Path, step: int, rank: int) -> Path:
    """The file of a rank's state dict."""
    return folder / f"step{step}.rank{rank}.pt"


def resumed(case: Case, folder: Path, seconds: float) -> list[Any]:
    """Observations after each step from `case.at` on, once this rank has read the files of all."""
    training = training_of(case.plan, case.resumed, seconds)
    numbers = range(len(case.plan.places))
    training.load([read_checkpoint(saved_at(folder, case.at, number)) for number in numbers])
    return trained(training, case.at)


def run(case: Case, folder: Path, seconds: float) -> list[Any]:
    """A rank's observations after each step, and after each from `case.at` on in a run resumed."""
    training, found = training_of(case.plan, case.side, seconds), []
    for step in range(STEPS):
        if step == case.at:
            saved = training.optimizer.state_dict()
            write_checkpoint(saved_at(folder, step, dist.get_rank()), saved)
        training.step(step)
        found.append(seen(training))
    dist.barrier()
    return [found, resumed(case, folder, seconds)]


def join(number: int, count: int, seconds: float, **options: Any) -> torch.device:
    """Initialise torch.distributed with NCCL if every rank has a GPU, and gloo; this rank's device.

    Args:
        number: of the rank.
        count: of ranks.
        seconds: after which a collective is given up.
        options: of `dist.init_process_group`.
    """
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.device_count() >= count and dist.is_nccl_available():
        device, backend = torch.device("cuda", number), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    else:
        activate()
    torch.set_num_threads(1)
    timeout = timedelta(seconds=seconds)
    dist.init_process_group(backend, rank=number, world_size=count, timeout=timeout, **options)
    return device


@dataclass(frozen=True)
class Loss:
    """A training that loses a rank in the step after its checkpoint.

    Attributes:
        case: the training, and its checkpoint.
        rank: that is lost.
        how: a signal to itself.
        call: number of the all-reduce of that step in which it happens; if there are fewer, it
            happens after the step.
        begun: this rank has begun it.
    """

    case: Case
    rank: int
    how: signal.Signals
    call: int
    begun: bool


def lose(number: int, loss: Loss, folder: Path, seconds: float) -> None:
    """A process of a training that loses a rank; the others leave their error in a file.

    From the step on in which it is lost, they give a collective up after these seconds. Where the
    machine is so slow that this happens before the loss, the rank is lost then.
    """
    try:
        _lose(number, loss, folder, seconds)
    except BaseException:
        (folder / f"said{number}").write_text(traceback.format_exc())
        os._exit(1)
    # What is left of the groups may wait for the lost rank.
    os._exit(0)


def _lose(number: int, loss: Loss, folder: Path, seconds: float) -> None:
    case, count = loss.case, len(loss.case.plan.places)
    join(number, count, LIMIT_S, init_method=f"file://{folder}/losing")
    training = training_of(case.plan, case.side, LIMIT_S)
    try:
        for step in range(case.at):
            training.step(step)
        write_checkpoint(saved_at(folder, case.at, number), training.optimizer.state_dict())
        dist.barrier()
        limit_collectives(seconds, list(GROUPS.values()))
        if number == loss.rank:
            _lose_at(loss, folder)
        for step in range(case.at, STEPS):
            training.step(step)
            dist.barrier()
    except RuntimeError as problem:
        if number == loss.rank:
            _gone(loss, folder)
        told = {"error": str(problem), "at": time.monotonic()}
        (folder / f"error{number}").write_text(json.dumps(told))


def _gone(loss: Loss, folder: Path) -> None:
    (folder / "gone").write_text(str(time.monotonic()))
    os.kill(os.getpid(), loss.how)


def _lose_at(loss: Loss, folder: Path) -> None:
    torch_dist: Any = dist
    calls, genuine = itertools.count(), torch_dist.all_reduce

    def all_reduce(*args: Any, **options: Any) -> Any:
        if next(calls) == loss.call:
            if loss.begun:
                genuine(*args, **options, async_op=True)
            _gone(loss, folder)
        return genuine(*args, **options)

    torch_dist.all_reduce, torch_dist.barrier = all_reduce, lambda: _gone(loss, folder)


def resume(number: int, loss: Loss, folder: Path) -> None:
    """A process of a training that goes on from the checkpoint; leaves what it has seen."""
    case = loss.case
    try:
        join(number, len(case.plan.places), LIMIT_S, init_method=f"file://{folder}/resuming")
        found = resumed(case, folder, LIMIT_S)
        (folder / f"resumed{number}").write_text(json.dumps(found))
        dist.destroy_process_group()
    except BaseException:
        (folder / f"said{number}").write_text(traceback.format_exc())
        raise


def simulated(case: Case) -> list[list[Any]]:
    """Observations of every rank of a simulated world, after each step."""

    def one(rank: Rank) -> list[Any]:
        return trained(training_on(case.plan, case.side, rank))

    return case.plan.world.run(one)


def gloo_threads() -> int:
    """Number of this process's threads that work for gloo; 0 where there is no /proc."""
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    return names.count("pt_gloo_runloop")


def main(cases: Path, folder: Path) -> None:
    """Run all cases; rank 0 prints."""
    number, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = join(number, count, LIMIT_S)
    for case in pickle.loads(cases.read_bytes()):
        with torch.device(device if case.side == case.resumed == "fast" else "cpu"):
            rows: list[Any] = [None] * count
            dist.all_gather_object(rows, run(case, folder, LIMIT_S))
        if number == 0:
            print(json.dumps({"backend": dist.get_backend(), "ranks": rows}), flush=True)
    dist.destroy_process_group()
    GROUPS.clear()
    gc.collect()
    # One that drops a tensor while Python ends: "terminate called without an active exception".
    assert gloo_threads() == 0


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
