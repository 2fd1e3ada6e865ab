"""A run broken off in the middle, in a file, and taken up again bit for bit."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import torch

from twinstep.scenarios.learner import Learner
from twinstep.scenarios.trace import Header, StepRecord, hexed, unhexed

FORMAT = "twinstep scenario 1"


class CheckpointUnfit(ValueError):
    """A file that should hold a run of this plan does not."""


def write(
    path: Path, learner: Learner, header: Header, before: float, records: Sequence[StepRecord]
) -> None:
    """Write a run in progress, with `torch.save`: plain types and tensors alone.

    Args:
        path: the file.
        learner: whose state is written.
        header: of the run.
        before: loss on unseen text before the first step.
        records: of the steps taken.
    """
    saved = {
        "format": FORMAT,
        "header": asdict(header),
        "before": before.hex(),
        "records": [hexed(record) for record in records],
        "learner": learner.state_dict(),
    }
    torch.save(saved, path)


def enter(path: Path, learner: Learner, header: Header) -> tuple[float, list[StepRecord]]:
    """Put a fresh learner where `write` left one; the other side's checkpoints fit, too.

    Args:
        path: what `write` wrote.
        learner: of the same plan; written in place.
        header: of the run that goes on.

    Returns:
        Loss on unseen text before the first step, and the records of the steps taken.

    Raises:
        CheckpointUnfit: the file holds something else, or a run of another plan. The learner has
            not changed.
    """
    try:
        saved: object = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as problem:
        first = str(problem).partition("\n")[0]
        raise CheckpointUnfit(f"{path} is no checkpoint of a scenario: {first}") from problem
    if not isinstance(saved, Mapping) or saved.get("format") != FORMAT:
        raise CheckpointUnfit(f"{path} is no checkpoint of a scenario: it lacks {FORMAT!r}")
    theirs = Header(**saved["header"])
    ours, other = asdict(header), asdict(replace(theirs, side=header.side))
    for name in ours:
        if ours[name] != other[name]:
            raise CheckpointUnfit(
                f"{path} holds a run with {name}={other[name]!r}, but should have "
                f"{name}={ours[name]!r} to go on with"
            )
    learner.load_state_dict(cast(Mapping[str, object], saved["learner"]))
    return float.fromhex(saved["before"]), [unhexed(record) for record in saved["records"]]
