"""Carrying out what was decided: what lies below the device, and how fast it is reached."""
