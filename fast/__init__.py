"""The production side: the reference's operations in Triton, in place and without host syncs."""

if __name__ != "twinstep.fast":
    raise ImportError("import twinstep.fast, not fast")
