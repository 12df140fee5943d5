"""Tokenizers: trained here or existing; always a directory that `transformers` loads."""
