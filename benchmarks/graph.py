"""Part: a captured step equals the eager one bit for bit, and no step waits for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from twinstep.benchmarks.part import Broken, Figures
from twinstep.benchmarks.state import (
    MIXED_OPTIONS,
    State,
    apply,
    bits,
    mixed_controls,
    new_state,
)
from twinstep.benchmarks.steps import STEPS as STEPS_OF
from twinstep.benchmarks.steps import Subject
from twinstep.fast.kernels.mixed_step import mixed_step_

LAYOUTS = {"flat": (65_543,), "list": (4099, 130, 2048, 1)}
SIZES = (4099, 130, 1)
STEPS = 6
OVERFLOW_AT = 3
CLASSES = ("FusedAdam", "FP16Optimizer", "FP16UnfusedOptimizer, LAMB")


def run() -> Iterator[Figures]:
    """Compare captured with eager steps in each layout; forbid synchronisation."""
    device = torch.device("cuda")
    for layout, sizes in LAYOUTS.items():
        check_capture(layout, sizes, device)
        check_no_synchronisation(layout, sizes, device)
        yield {layout: f"{STEPS} steps"}
    for name in CLASSES:
        check_class(name, device)
        yield {name: f"{STEPS} steps"}


def step(state: State, controls: dict[str, Tensor]) -> None:
    """One mixed-precision step."""
    apply(mixed_step_, state, controls, **MIXED_OPTIONS)


def prepare(state: State, number: int) -> None:
    """Change the gradients in place, as a backward pass would; one step overflows."""
    for grad in state.grads:
        grad.mul_(-1.25)
    if number == OVERFLOW_AT:
        state.grads[-1][-1] = float("inf")
    elif number == OVERFLOW_AT + 1:
        state.grads[-1][-1] = 0.5


def check_capture(layout: str, sizes: tuple[int, ...], device: torch.device) -> None:
    """Run the same steps eagerly and by replaying one captured step.

    Raises:
        Broken: any bit of tensors or controls differs after any step.
    """
    eager, captured = new_state(sizes, device), new_state(sizes, device)
    eager_controls, captured_controls = mixed_controls(device), mixed_controls(device)
    # Capture needs compiled kernels and tables: the first step is an ordinary one on both.
    step(eager, eager_controls)
    step(captured, captured_controls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(captured, captured_controls)
    for number in range(STEPS):
        prepare(eager, number)
        prepare(captured, number)
        step(eager, eager_controls)
        graph.replay()
        if not eager.equals(captured):
            raise Broken(f"{layout}: tensors differ after captured step {number}")
        for name, value in eager_controls.items():
            if not torch.equal(value, captured_controls[name]):
                raise Broken(f"{layout}: {name} differs after captured step {number}")


def check_class(name: str, device: torch.device) -> None:
    """Run the same steps of a class eagerly and by replaying one, whose state was made before.

    Raises:
        Broken: any bit of the weights differs after any step.
    """
    dtype, make = STEPS_OF[name]
    sides = []
    for _ in range(2):
        torch.manual_seed(0)
        sides.append(Subject(make, SIZES, dtype, device))
    eager, captured = sides
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    captured.give()
    with torch.cuda.graph(graph):
        captured.step()
    for number in range(STEPS):
        for side in sides:
            for grad in side.grads:
                grad.mul_(-1.25)
        eager.give()
        eager.step()
        graph.replay()
        for one, other in zip(eager.params, captured.params, strict=True):
            if not torch.equal(bits(one.detach()), bits(other.detach())):
                raise Broken(f"{name}: weights differ after captured step {number}")


def check_no_synchronisation(layout: str, sizes: tuple[int, ...], device: torch.device) -> None:
    """Run a step while torch turns every wait for the GPU into an error.

    Raises:
        Broken: something waited.
    """
    state, controls = new_state(sizes, device), mixed_controls(device)
    step(state, controls)
    try:
        with synchronisation_is_an_error():
            step(state, controls)
    except RuntimeError as error:
        raise Broken(f"{layout}: the step waits for the GPU: {error}") from error


@contextmanager
def synchronisation_is_an_error() -> Iterator[None]:
    """Every call inside the block that waits for the GPU raises."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
