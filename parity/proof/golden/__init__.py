"""Golden traces replayed by both of our sides, and their manifest held to the files."""
