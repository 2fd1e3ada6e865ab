"""Record `torch.amp.GradScaler`, driven through its public interface."""

from __future__ import annotations

from twinstep.golden.sequences import Situation
from twinstep.golden.trace import Header, Step, Trace

COMMAND = "python -m twinstep.golden.record torch"


def record(situation: Situation) -> Trace:
    """Run the real scaler through a situation; needs torch, on the CPU."""
    import torch

    constants = situation.constants

    def made() -> torch.amp.GradScaler:
        return torch.amp.GradScaler(
            "cpu",
            init_scale=situation.scale,
            growth_factor=float(constants["growth_factor"]),
            backoff_factor=float(constants["backoff_factor"]),
            growth_interval=int(constants["growth_interval"]),
        )

    scaler = made()
    scaler.scale(torch.ones(()))
    param = torch.nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([param], lr=0.0)
    start = float(scaler.get_scale())
    steps: list[Step] = []
    for letter in situation.steps:
        if letter == "R":
            saved, scaler = scaler.state_dict(), made()
            scaler.load_state_dict(saved)
            scaler.scale(torch.ones(()))
        elif letter == "X":
            scaler.update(float(constants["override"]))
        else:
            param.grad = torch.tensor([{"o": torch.inf, "n": torch.nan}.get(letter, 1.0)])
            scaler.step(sgd)
            scaler.update()
        state = scaler.state_dict()
        steps.append({"scale": float(state["scale"]), "growth_tracker": state["_growth_tracker"]})
    header = Header(
        name=f"torch_{situation.name}",
        package="torch",
        version=torch.__version__,
        subject="torch.amp.GradScaler",
        command=COMMAND,
        rule="torch",
        constants=constants,
        start={"scale": start, "growth_tracker": 0},
        steps=situation.steps,
    )
    return Trace(header=header, steps=steps)
