"""Measurements and checks on a GPU: what the judge does not decide, timed and recorded."""

if __name__ != "twinstep.benchmarks":
    raise ImportError("import twinstep.benchmarks, not benchmarks")
