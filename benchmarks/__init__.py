"""Measurements and checks on a GPU: what the judge does not decide, timed and recorded."""
