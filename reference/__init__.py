"""Every optimizer step as plain PyTorch that reads like its equation.

The functions here take the arguments of an operation, mutate nothing and return one entry per
written argument. `README.md` maps each file to its equation and to its fast twin.
"""

if __name__ != "twinstep.reference":
    raise ImportError("import twinstep.reference, not reference")
