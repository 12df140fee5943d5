"""What is known of devices and clusters: catalogue, measured speeds, calibration."""
