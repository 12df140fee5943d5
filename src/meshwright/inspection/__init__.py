"""A look into model files: shards, tensors, values, which device would hold what. Torch is loaded for `.bin` alone."""
