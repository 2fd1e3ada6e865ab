"""The commands for users: what they print and which exit code they end with."""
