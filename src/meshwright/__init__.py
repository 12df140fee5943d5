"""Meshwright: plan, verify, train and serve language models on any number of devices."""

__version__ = "0.1.0"
