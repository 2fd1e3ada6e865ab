"""PTX of many kernels, from many compilers, with independently stated results.

`kernels/` and `cuda/` hold the sources, each kernel next to a statement of what it computes;
`data/` what four Tritons and two NVRTCs made of them for three targets. `store` reads it,
`execute` runs it on replay, `census` counts its instructions, `make` makes it all again.
"""
