"""Control block, pointer tables, launches, and checks of what kernels take for granted."""
