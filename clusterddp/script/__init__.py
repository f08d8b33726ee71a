"""What a user's own script calls: log, progress, output directory, checkpoints, stop. Importing it imports no torch."""
