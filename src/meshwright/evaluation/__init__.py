"""Loss, perplexity and bits per byte of checkpoints."""
