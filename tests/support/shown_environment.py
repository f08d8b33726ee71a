"""Prints the environment that its children get, as a dict in the order of the names."""

import os

print(dict(sorted(os.environ.items())))
