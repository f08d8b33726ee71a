"""The join command: each machine of a run joins from a terminal of its own."""
