"""Memory: what loss scaling did, recorded from scalers that others ship, and digests of ours."""
