"""Triton's interpreter beside replay: where it leaves what compiled kernels compute.

`constructs` lists small kernels with the statement of what they should leave; `measure` runs them
in the interpreter (a child process with TRITON_INTERPRET=1), on replay, and on a GPU where there is
one; `facts` says what a kernel is made of, and `report` which of the divergences it meets.
docs/reference/engines.md is the table.
"""
