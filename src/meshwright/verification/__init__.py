"""Verification of layouts against one device: a small model is trained on both, and every result of training is
compared."""
