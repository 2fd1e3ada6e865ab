"""A call captured as a CUDA graph, and replayed on other contents of the same memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from twinstep.parity.cases.guarded_memory import GuardedMemory
from twinstep.parity.runner.calls.invoke import Ended, invoke


def call_captured(function: Callable[..., object], memory: GuardedMemory, seconds: float) -> Ended:
    """Replay the graph of this memory, captured first if there is none.

    The kernel is called once eagerly before the capture, so that compilation is over by then.
    """
    if memory.graph is None:
        ended = invoke(function, memory, seconds)
        if ended.failure:
            return ended
        memory.refill()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                memory.call(function)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            return Ended(f"cannot be captured as a CUDA graph: {cause}")
        memory.graph = graph
        memory.refill()
    memory.graph.replay()
    torch.cuda.synchronize()
    return Ended()
