"""Known-wrong kernels that the judge must reject, and harmless variants that it must accept.

    corpus()    every wrong kernel: what is wrong, its real bug, the law that must see it
    harmless()  every variant that is written otherwise and is right

Both are data: importing this package registers nothing. Each operation has one correct, readable
baseline in plain torch (`adam`, `sgd`, `gradients`, `scales`, `buffers`, `mixed`) with a seam at
every formula; a wrong kernel replaces one piece of it, so that it reads as the sentence that states
what is wrong. `triton_kernels` holds the same for kernels that are compiled.
"""

from twinstep.parity.proof.corpus.corpus import corpus, harmless
from twinstep.parity.proof.corpus.entry import Entry, Variant

__all__ = ["Entry", "Variant", "corpus", "harmless"]
