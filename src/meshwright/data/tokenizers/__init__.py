"""Tokenizers, trained here or existing, always stored as a directory that `transformers` loads."""
