"""Joining: a run whose machines come one by one, each from a terminal of its own."""
