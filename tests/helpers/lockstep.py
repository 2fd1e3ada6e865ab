"""Threads in lock step: one runs until it gives its turn away, then the next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from twinstep.replay.launch.run import run

T = TypeVar("T")
SECONDS = 60.0


class _Turns:
    def __init__(self, count: int) -> None:
        self.changed = threading.Condition()
        self.left = list(range(count))
        self.own = threading.local()
        self.switches = 0

    def begin(self, place: int) -> None:
        self.own.place = place
        with self.changed:
            self._wait(place)

    def switch(self) -> None:
        """Let the next thread run; does nothing in a thread that has no turn."""
        place = getattr(self.own, "place", None)
        if place is None:
            return
        with self.changed:
            self.switches += len(self.left) > 1
            self.left.append(self.left.pop(0))
            self.changed.notify_all()
            self._wait(place)

    def end(self) -> None:
        with self.changed:
            self.left.pop(0)
            self.changed.notify_all()

    def _wait(self, place: int) -> None:
        if not self.changed.wait_for(lambda: self.left[0] == place, SECONDS):
            raise TimeoutError(f"thread {place} had no turn within {SECONDS:g} seconds")


def in_lock_step(*functions: Callable[[Callable[[], None]], T]) -> list[T]:
    """Results of functions that run in threads, in turns.

    Each is given the function that gives its turn away. An exception of one of them is raised.
    """
    turns = _Turns(len(functions))
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def one(place: int, function: Callable[[Callable[[], None]], T]) -> None:
        turns.begin(place)
        try:
            results[place] = function(turns.switch)
        except BaseException as error:
            errors.append(error)
        finally:
            turns.end()

    threads = [
        threading.Thread(target=one, args=(place, function), daemon=True)
        for place, function in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert turns.switches >= len(functions) > 1, "no thread gave its turn away"
    return [results[place] for place in range(len(functions))]


def switching_at_launches(monkeypatch: pytest.MonkeyPatch, *functions: Callable[[], T]) -> list[T]:
    """Results of functions that run in threads and give their turn away before and after a launch.

    Before: when the launcher has prepared everything and nothing has run.
    """
    here = threading.local()

    def switching(request: Any) -> Any:
        switch = getattr(here, "switch", None)
        if switch is None:
            return run(request)
        switch()
        launch = run(request)
        switch()
        return launch

    def given(function: Callable[[], T]) -> Callable[[Callable[[], None]], T]:
        def one(switch: Callable[[], None]) -> T:
            here.switch = switch
            return function()

        return one

    monkeypatch.setattr("twinstep.replay.triton.launcher.run", switching)
    return in_lock_step(*map(given, functions))
