"""Devices and clusters: catalogue, measured speeds, calibration."""
