"""What a run leaves behind: the ledger, and errors with their exit codes."""
