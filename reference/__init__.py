"""Every optimizer step as plain PyTorch that reads like its equation.

Functions here mutate nothing and return what is new; `optimizers` adds state, masters and ranks.
`README.md` maps each file to its equation and to its fast twin.
"""

if __name__ != "twinstep.reference":
    raise ImportError("import twinstep.reference, not reference")
