"""Static facts of compiled kernels, and the ceilings that they must keep.

`variants` and `cuda` find every way in which our kernels are launched, `worker` compiles them in a
child process, `artefacts` reads facts off what the compiler wrote, `build` puts these together and
keeps the results, `ceilings` compares with what is recorded.
"""
