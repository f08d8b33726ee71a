"""The images and labels of a run: where they come from, who sees which, and what they look like."""
