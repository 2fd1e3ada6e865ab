"""A whole training run on one side; broken off into a file, and taken up again bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from twinstep.contract.checkpoint import read_checkpoint, write_checkpoint
from twinstep.scenarios.calls import answer_of, device_of
from twinstep.scenarios.plan import Plan
from twinstep.scenarios.ranks import Ranks
from twinstep.scenarios.trace import Header, StepRecord, Trace, hexed, unhexed
from twinstep.scenarios.trainers import ALONE, ClassTrainer, OperationTrainer, Trainer

Progress = Callable[[StepRecord], None]
FORMAT = "twinstep scenario 2"


class CheckpointUnfit(ValueError):
    """A file that should hold a run of this plan does not."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread, and restore the number of threads afterwards.

    The number of threads decides how sums are split, and the bits of a run must not depend on how
    many cores the machine has. In one thread torch's CPU algorithms are deterministic; a test
    holds every one of them to that with `torch.use_deterministic_algorithms`, which would cost
    each run two seconds of imports.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def trainer_of(side: str, plan: Plan, ranks: Ranks) -> Iterator[Trainer]:
    """A run on one side, ready for its first step; that side's engine runs inside the block."""
    with device_of(side) as device:
        if plan.optimizer == "mixed_step":
            yield OperationTrainer(plan, answer_of(side, device), ranks)
        else:
            yield ClassTrainer(plan, side, device, ranks)


def run(
    side: str,
    plan: Plan,
    progress: Progress | None = None,
    *,
    resume: Path | None = None,
    stop: int | None = None,
    save: Path | None = None,
    every: int | None = None,
    ranks: Ranks = ALONE,
) -> Trace:
    """Train with one side's arithmetic.

    Args:
        side: "reference", or "fast" (on the GPU, or on the CPU where there is none).
        plan: what to run.
        progress: called with every step's record; not with those before `resume`.
        resume: a checkpoint to go on from, of either side.
        stop: stop after this step of the plan, which stays the plan of the whole run.
        save: a checkpoint to write after the last step; rank 0 writes it.
        every: write it after each so many steps, too.
        ranks: that share each step's micro-batches.

    Returns:
        The trace from the first step on, before `resume` too; two runs with equal arguments on one
        machine are equal to the last bit, and so are a run and one broken by save and resume. A run
        on as many ranks as micro-batches equals that of one process, but for ZeRO, and with
        `mixed_step` or exact sums a run on any number of ranks does.

    Raises:
        CheckpointUnfit: `resume` holds no run of this plan.
        ValueError: ranks do not divide the micro-batches.
    """
    if plan.accumulate % ranks.count:
        raise ValueError(
            f"ranks={ranks.count}, but should divide the {plan.accumulate} micro-batches of a step "
            "[accumulate]"
        )
    with one_thread(), trainer_of(side, plan, ranks) as trainer:
        header, records = trainer.header(side), list[StepRecord]()
        if resume is None:
            before = trainer.held_out_loss()
        else:
            before, records = load_checkpoint(resume, trainer, header)
        last = plan.steps if stop is None else min(stop, plan.steps)
        due = range(every or last, last, every or last)
        while trainer.step < last:
            records.append(trainer.advance())
            if progress is not None:
                progress(records[-1])
            if save is not None and trainer.step in due:
                save_checkpoint(save, trainer, header, before, records)
        if save is not None:
            save_checkpoint(save, trainer, header, before, records)
        return Trace(header=header, records=records, held_out=(before, trainer.held_out_loss()))


def save_checkpoint(
    path: Path, trainer: Trainer, header: Header, before: float, records: Sequence[StepRecord]
) -> None:
    """Write where a run is, for `load_checkpoint`; every rank calls this, and rank 0 writes.

    Args:
        path: what is there already stays until the new file is whole.
        trainer: of the run.
        header: of the run.
        before: loss on unseen text before the first step.
        records: of the steps taken.
    """
    saved = {
        "format": FORMAT,
        "header": asdict(header),
        "before": before.hex(),
        "records": [hexed(record) for record in records],
        "learner": trainer.state_dict(),
    }
    if trainer.ranks.number == 0:
        write_checkpoint(path, saved)


def load_checkpoint(path: Path, trainer: Trainer, header: Header) -> tuple[float, list[StepRecord]]:
    """Put a fresh trainer where `run` saved one, on either side and any number of ranks.

    Args:
        path: what `run` saved.
        trainer: of the same plan; written in place.
        header: of the run that goes on.

    Returns:
        Loss on unseen text before the first step, and the records of the steps taken.

    Raises:
        CheckpointUnfit: the file holds something else, or a run of another plan. The trainer has
            not changed.
    """
    try:
        group = trainer.ranks.group
        saved: dict[str, Any] = read_checkpoint(path, [] if group is None else [group])
    except ValueError as problem:
        raise CheckpointUnfit(f"{path} is no checkpoint of a scenario: {problem}") from problem
    if saved.get("format") != FORMAT:
        raise CheckpointUnfit(f"{path} is no checkpoint of a scenario: it lacks {FORMAT!r}")
    found = replace(Header(**saved["header"]), side=header.side, ranks=header.ranks)
    ours, other = asdict(header), asdict(found)
    for name in ours:
        if ours[name] != other[name]:
            raise CheckpointUnfit(
                f"{path} holds a run with {name}={other[name]!r}, but should have "
                f"{name}={ours[name]!r} to go on with"
            )
    trainer.load_state_dict(saved["learner"])
    return float.fromhex(saved["before"]), [unhexed(record) for record in saved["records"]]
