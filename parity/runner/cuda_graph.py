"""A call captured as a CUDA graph, and replayed on other contents of the same memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from twinstep.parity.cases.guarded_memory import GuardedMemory
from twinstep.parity.runner.invoke import invoke


def call_captured(function: Callable[..., object], memory: GuardedMemory, seconds: float) -> str:
    """Replay the graph of this memory, captured first if there is none; empty if it went well.

    The kernel is called once eagerly before the capture, so that compilation is over by then.
    """
    if memory.graph is None:
        failure = invoke(function, memory, seconds)
        if failure:
            return failure
        memory.refill()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                memory.call(function)
        except Exception as error:
            return f"cannot be captured as a CUDA graph: {type(error).__name__}: {error}"
        memory.graph = graph
        memory.refill()
    memory.graph.replay()
    torch.cuda.synchronize()
    return ""
