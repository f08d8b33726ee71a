"""The plan: everything that a submit would do, as a value. This package writes and starts nothing."""
