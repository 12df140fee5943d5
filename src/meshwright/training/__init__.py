"""Training: step, loop, optimizers, precision, predictions beside measurements."""
