"""Threads and memory: lanes, warps, barriers, checked accesses, atomics, execution."""
