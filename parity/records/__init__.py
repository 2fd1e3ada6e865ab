"""Records of a run: the ledger, and errors with their exit codes."""
