"""What the loaders of serving engines share: configuration, choice of weights, tensors, lending."""
