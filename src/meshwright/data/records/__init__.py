"""Instruction, chat and preference records: reading, chat templates, tokens with response masks."""
