"""Other projects' optimizers, scalers and norms before the same judge.

Each adapter is as thin as it can be: it hands the caller's memory to the peer's public class and
adds only what the operation has and the peer lacks. What is found is kept in `findings.json`.
"""
