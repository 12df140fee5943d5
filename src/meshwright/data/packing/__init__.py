"""Packed tokens in memory-mapped shards, and packed examples."""
