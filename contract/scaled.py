"""An optimizer that scales its loss, from outside: gradients that its `backward` did not make."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, cast

import torch

from twinstep.contract.wrapper import Wrapper

LOG = logging.getLogger(__name__)


class Scaler(Protocol):
    """A scale and the memory of its rule."""

    @property
    def loss_scale(self) -> float:
        """The scale."""

    def state_dict(self) -> Mapping[str, float | int | bool]:
        """Memory of the rule."""


class Scaled(Wrapper):
    """A wrapper whose step divides gradients by the scale that multiplied the loss.

    `cur_scale`, `cur_iter`, `low_precision_dtype` and `_global_grad_norm` are DeepSpeed's names.

    Attributes:
        scales: False where the loss is never scaled.
        verbose: log what may be a mistake, once.
        external_loss_scale: a scale from outside, or None.
    """

    scales: bool
    verbose: bool
    external_loss_scale: float | None
    _asked = _own = False

    @property
    def cur_scale(self) -> float:
        """The scaler's own scale, whatever is in force from outside."""
        return self._scaler().loss_scale

    @property
    def cur_iter(self) -> int:
        """Steps that the rule has counted; 0 where it counts none."""
        return int(self._scaler().state_dict().get("cur_iter", 0))

    @property
    def low_precision_dtype(self) -> torch.dtype:
        """As constructed."""
        return cast(torch.dtype, self._built_with().get("low_precision_dtype", torch.float16))

    @property
    def _global_grad_norm(self) -> float:
        return cast(float, self.get_global_norm())  # type: ignore[attr-defined]

    def _half(self) -> torch.dtype | None:
        return self.low_precision_dtype if self._model == "fp16_groups" and self.verbose else None

    def _scaler(self) -> Scaler:
        return cast(Scaler, self.loss_scaler)  # type: ignore[attr-defined]

    def _note_gradients(self) -> None:
        """Remember what backward has left."""
        if self._looks():
            self._mark.look(self._trained())

    def _refuse(self, closure: object) -> None:
        super()._refuse(closure)
        if self._model == "fp16_groups" and self.verbose:
            self._name_idle_step(self._trained())
        if self._looks() and self._mark.differs(self._trained()):
            self._say_foreign()

    @contextmanager
    def _taking_its_own(self) -> Iterator[None]:
        """While the optimizer's `backward` runs, and takes what it has made."""
        self._own = True
        try:
            yield
        finally:
            self._own = False

    def _note_taken(self) -> None:
        """Look at gradients that are about to be taken; `backward` leaves none behind."""
        if self._own or not self._divides():
            return
        if any(param.grad is not None for param in self._trained()):
            self._say_foreign()

    def _say_foreign(self) -> None:
        self._asked = True
        LOG.warning(
            "gradients are not as optimizer.backward(loss) left them, and are divided by the "
            "loss scale: loss.backward() does not multiply by it, and clipping by hand has to "
            "reckon with it, as clip_grad does [%s.step, said once]",
            type(self).__name__,
        )

    def _looks(self) -> bool:
        """Whether gradients wait for the step where backward has left them, and may be scaled."""
        return self._model == "fp16_groups" and self._divides()

    def _divides(self) -> bool:
        """Whether the scale can be another than 1, as far as the host knows, and was not said."""
        if self._asked or not self.scales or not self.verbose:
            return False
        given = self._built_with()
        return bool(
            given.get("dynamic_loss_scale")
            or given.get("static_loss_scale", 1.0) != 1.0
            or given.get("loss_scale_config")
            or self.external_loss_scale
        )

    def _kept(self) -> dict[str, object]:
        return {"external_loss_scale": self.external_loss_scale}
