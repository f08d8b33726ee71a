"""Login nodes: commands that are carried out there, and what is known here of the runs they made."""
