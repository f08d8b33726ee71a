"""What a rank must know of its gang: variables, port, interface, devices."""
