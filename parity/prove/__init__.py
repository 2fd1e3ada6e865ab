"""Proof: a kernel's compiled code and its reference have the same expression for every output."""
