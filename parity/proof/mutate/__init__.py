"""The judge judged by number: wrong kernels, faults planted in our own source, harmless variants.

    wrong kernels      parity/proof/corpus: written by hand, each with the law that must kill it
    planted faults     every place in fast/kernels where a rule can change the source
    harmless variants  parity/proof/corpus: written otherwise and right

`parity mutate` judges all three. It passes if every wrong kernel dies by its law, every planted
fault by some law, unless the compiler makes the original's instructions of it or survivors.py
argues why nothing can see it, if no variant is rejected, and if every law kills something that no
other law does.
"""
