"""PTX to Python, once per kernel: one function of NumPy calls for each basic block."""
