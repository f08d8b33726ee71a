"""Read a run: its status, its progress, its logs. Nothing here starts, stops or changes anything."""
