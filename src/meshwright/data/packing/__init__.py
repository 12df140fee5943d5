"""Packing: tokenized documents in shards, read back as packed rows of fixed length."""
