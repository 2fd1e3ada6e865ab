"""Sequences over simulated ranks: worlds, parameters and process groups drawn with the actions."""
