"""Regressions between two checkouts: counts that are exact, times in pairs, and their history."""
