"""What both sides promise and neither computes: errors, choices, checks, protocols, checkpoints.

`reference` and `fast` import it; it imports torch and the standard library. Nothing here does
arithmetic on tensors, so that no mistake of arithmetic can be shared.
"""

if __name__ != "twinstep.contract":
    raise ImportError("import twinstep.contract, not contract")
