"""Facts of our own code that may not move: digests, traces, bytes, compiled code."""
