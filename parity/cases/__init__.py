"""Inputs: covering design, generation by bit pattern, guarded memory."""
