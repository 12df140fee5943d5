"""Adapters: LoRA and its variants on the linear layers of a model, on any layout."""
