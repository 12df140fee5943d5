"""Instruction, chat and preference records: parsing, chat templates, tokens with response masks."""
