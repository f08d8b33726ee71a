"""A fuzzer of everything that is read from outside: `python -m tests.fuzz`."""
