"""Simulated ranks: genuine process groups of torch whose ranks are threads that take turns."""
