"""Layouts against one device: `verify` runs a small model both ways and compares all that training is made of."""

from meshwright.verification.run import verify

__all__ = ["verify"]
