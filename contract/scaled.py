"""An optimizer that scales its loss, from outside: gradients that its `backward` did not make."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain

from torch import Tensor

from twinstep.contract.wrapper import Wrapper

LOG = logging.getLogger(__name__)


class Scaled(Wrapper):
    """A wrapper whose step divides gradients by the scale that multiplied the loss.

    Attributes:
        scales: False where the loss is never scaled.
        verbose: log what may be a mistake, once.
        external_loss_scale: a scale from outside, or None.
    """

    scales: bool
    verbose: bool
    external_loss_scale: float | None
    _asked = False

    def _note_gradients(self) -> None:
        """Remember what backward has left."""
        if self._looks():
            self._mark.look(self._trained())

    def _refuse(self, closure: object) -> None:
        super()._refuse(closure)
        if self._looks() and self._mark.differs(self._trained()):
            self._asked = True
            LOG.warning(
                "gradients are not as optimizer.backward(loss) left them, and are divided by the "
                "loss scale: loss.backward() does not multiply by it, and clipping by hand has to "
                "reckon with it, as clip_grad does [%s.step, said once]",
                type(self).__name__,
            )

    def _looks(self) -> bool:
        """Whether the scale can be another than 1, as far as the host knows, and was not said."""
        if self._asked or not self.scales or not self.verbose or self._model != "fp16_groups":
            return False
        given = self._built_with()
        return bool(
            given.get("dynamic_loss_scale")
            or given.get("static_loss_scale", 1.0) != 1.0
            or given.get("loss_scale_config")
            or self.external_loss_scale
        )

    def _trained(self) -> Iterator[Tensor]:
        return chain.from_iterable(getattr(self, self._model))

    def _kept(self) -> dict[str, object]:
        return {"external_loss_scale": self.external_loss_scale}
