"""Addresses and interfaces: which network the hosts of a run reach each other by."""
