"""Research modes: exchanges that train something else than one rank would, and convolutions for odd processors.

A mode is an `Exchange` (train/exchange.py): a training step calls `scope`, `after_backward` and `after_step`, and code
that reads the model of all ranks calls `averaged`. Only `train/begin.py` knows the modes by name.
"""
