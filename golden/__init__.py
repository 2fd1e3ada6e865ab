"""Memory: what loss scaling did, recorded from scalers that others ship, and digests of ours."""

if __name__ != "twinstep.golden":
    raise ImportError("import twinstep.golden, not golden")
