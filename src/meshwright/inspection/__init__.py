"""Inspection of model files: shards, tensors, values, and their placement on ranks. Torch is imported for `.bin` files
only.
"""
