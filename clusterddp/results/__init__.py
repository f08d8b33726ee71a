"""Copies the files of remote runs back and keeps them as new as can be."""
