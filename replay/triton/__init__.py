"""Triton's driver interface, so that `kernel[grid](...)` takes CPU tensors."""
