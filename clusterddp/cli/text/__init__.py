"""What the commands draw: a plan, a run, its progress, a sweep, the processes on machines."""
