"""Import: reads files of other launchers as data and writes a spec; nothing of them is executed."""
