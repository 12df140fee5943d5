"""Synthetic data with a served model: new instructions, speech-act labels, exchange with annotation tools."""
