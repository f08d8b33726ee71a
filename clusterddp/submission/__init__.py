"""Carry out a plan: make the run's directory, start it, wait for it, cancel it, resume it."""
