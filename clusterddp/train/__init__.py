"""The DDP trainer: the only package that imports torch."""

import warnings

# torch prints this, two lines for each rank, when it is imported without numpy. Nothing here needs numpy.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
