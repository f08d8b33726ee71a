"""How processes find each other, authenticate, and are counted before torch starts."""
