"""What a machine is, and what that means for a run: told and judged with plain Python, on hosts and beside them."""
