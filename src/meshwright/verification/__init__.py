"""Layouts against one device: a small model is trained both ways, and all that training is made of is compared."""
