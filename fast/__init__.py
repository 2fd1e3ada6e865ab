"""The production side: the reference's operations in Triton, in place and without host syncs."""
