"""Every reachable state of the loss scalers, ours and others' stepped from each of them."""
