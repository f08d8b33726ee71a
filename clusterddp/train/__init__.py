"""The DDP trainer: the only room with torch."""

import warnings

# torch says so, in two lines for each rank, while it is imported where there is no numpy. Nothing here needs it.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
