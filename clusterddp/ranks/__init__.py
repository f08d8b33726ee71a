"""Rank variables: what each launcher sets, and what a rank's entry gets."""
