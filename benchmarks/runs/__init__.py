"""Runs of all benchmarks: results, their table and picture, their history."""
