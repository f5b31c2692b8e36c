"""Per-sample clipped gradients of ordinary torch modules: the input of the mechanism."""
