"""Actions by hand on an FP16 wrapper: older files, rates that are no numbers."""

from __future__ import annotations

import copy
import pickle
from typing import Any, cast

from twinstep.parity.sequences.actions import action
from twinstep.parity.sequences.by_hand import DEFAULTS, default_dtype
from twinstep.parity.sequences.parts import SEEDS
from twinstep.parity.sequences.rules import OptimizerRules
from twinstep.parity.sequences.scaler_rules import ELSEWHERE
from twinstep.parity.sequences.world import Act, World


class ScaledByHand(OptimizerRules):
    """Actions on FP16 wrappers that go around their methods."""

    @action(drives=("load_state_dict",))
    def load_older(self, world: World) -> None:
        """Load what an older version saved: whole numbers, no clip norm, other constants."""
        self.save(world)
        state = self._read(world)
        state.pop("clip_grad", None)
        state |= {name: value for name, value in ELSEWHERE.items() if name in state}
        self.enter(world, {name: _whole(value) for name, value in state.items()})

    @action(how=("deepcopy", "pickle"))
    def look_at_copy(self, world: World, how: str) -> object:
        """Read the scale of a copy, which then overflows; going on with it loses the parameters."""
        optimizer = cast(Any, world.optimizer)
        if how == "pickle":
            copied = pickle.loads(pickle.dumps(optimizer))
        else:
            copied = copy.deepcopy(optimizer)
        numbers = (copied.loss_scale, copied.external_loss_scale, copied.clip_grad)
        state = copied.loss_scaler.state_dict()
        copied.loss_scaler.update_scale(True)
        return *numbers, state

    @action(seed=SEEDS, dtype=tuple(DEFAULTS))
    def train_by_default(self, world: World, seed: int, dtype: str) -> object:
        """Gradients and an update while torch's default dtype is another; the norm of the step."""
        with default_dtype(dtype):
            done = self.apply(world, Act("train", {"seed": seed, "size": 1.0}))
            return done, cast(Any, world.optimizer).get_global_norm()

    @action(drives=("step",), group=range(4))
    def step_on_text(self, world: World, group: int) -> object:
        """Try to step with a learning rate that is no number."""
        groups = world.torch_optimizer.param_groups
        chosen = groups[group % len(groups)]
        rate, chosen["lr"] = chosen["lr"], "0.1"
        try:
            return self.step(world)
        finally:
            chosen["lr"] = rate


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value
