"""The DDP trainer: the only room with torch."""
