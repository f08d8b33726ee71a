"""The plan: everything that a submit would do, as a value. Nothing is written or started here."""
