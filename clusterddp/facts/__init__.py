"""The facts of a machine, and the rules that judge them: plain Python, on this machine, on nodes and on hosts."""
