"""Training: step, loop, optimizers, precision, predicted and measured figures."""
