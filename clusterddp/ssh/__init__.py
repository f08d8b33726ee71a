"""Connects to hosts by SSH, as the user's own ssh would, and runs sessions with the agents there."""
