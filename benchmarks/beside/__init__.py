"""Rows that are timed beside one another: registered kernels, peers, and what memory allows."""
