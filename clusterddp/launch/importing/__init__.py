"""Import: what other launchers are told by, read as data and written as a spec; nothing of it is ever executed."""
