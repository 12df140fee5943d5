"""Cost model: operators and their times, communication, the time of a training step, bytes on the wire."""
