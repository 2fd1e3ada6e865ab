"""Interface of an FP16 wrapper, and timers for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from twinstep.parity.sequences.fills import INF, NAN

REFUSED: Mapping[str, Sequence[object]] = {
    "norm_type": (0.0, -1.0, NAN, "largest"),
    "static_loss_scale": (0.0, -1.0, NAN, INF),
    "clip_grad": ("small", None),
    # One entry alone, one that is missing, and one whose name is misspelt.
    "dynamic_loss_args": (
        {"init_scale": 8.0},
        {"init_scale": 8.0, "scale_window": 3},
        {"init_scale": 8.0, "scale_windw": 3, "min_scale": 1.0},
    ),
}


class _Scaler(Protocol):
    dynamic: bool

    def state_dict(self) -> dict[str, object]:
        """State of the rule."""


class Scaled(Protocol):
    """The interface beyond that of torch's optimizers."""

    loss_scale: float
    overflow: bool
    clip_grad: float
    loss_scaler: _Scaler
    load_state_dict: Callable[..., None]

    def initialize_optimizer_states(self) -> None:
        """Make all state."""

    def backward(self, loss: Tensor, create_graph: bool, retain_graph: bool) -> None:
        """Run backward from the scaled loss."""

    def override_loss_scale(self, loss_scale: float | None) -> None:
        """Put an external scale in force, or end it."""

    def refresh_fp32_params(self) -> None:
        """Masters from model weights."""

    def get_global_norm(self) -> float:
        """Norm of the last step."""

    def memory_report(self) -> dict[str, int]:
        """Bytes by kind."""

    def set_lr(self, lr: float) -> None:
        """One learning rate for all groups."""

    def get_lr(self) -> float:
        """That of the first group."""


@dataclass
class Timers:
    """Timers that write down when they are asked for a report, and whether phases are open then.

    Phases are each side's own.

    Attributes:
        events: get a line for each report.
        open: phases that have begun and not ended.
    """

    events: list[str]
    open: int = 0

    def __call__(self, name: str) -> Timers:
        """The timer of that name."""
        return self

    def start(self) -> None:
        """Begin a phase."""
        self.open += 1

    def stop(self) -> None:
        """End it."""
        self.open -= 1

    def log(self, names: Sequence[str]) -> None:
        """Report some."""
        self.events.append(f"times, {self.open} phases open")
