"""What answers on a host, at the other end of an SSH connection: plain Python, nothing else need be installed there."""
