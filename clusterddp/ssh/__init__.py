"""Connections to hosts by SSH, as the user's own ssh would make them, and sessions with the agents there."""
