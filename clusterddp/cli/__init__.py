"""The command: what people type and see."""
