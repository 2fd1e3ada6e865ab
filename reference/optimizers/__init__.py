"""Optimizers of the reference: the mathematics of the folder above, with state, masters and ranks.

A module is imported by its own name, such as `reference.optimizers.fp16`, so that a plain optimizer
brings nothing that it does not use.
"""
