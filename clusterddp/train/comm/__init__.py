"""How ranks exchange what they have learned: exactly, or faster over a slow link."""
