"""Adapters: LoRA and its kin on the linear layers of a model, on any layout."""
