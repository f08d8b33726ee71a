"""The page of `report`: HTML and SVG drawn from values, in one file that asks for nothing else."""
