"""Fuzzing of everything that a user can write: `make fuzz`, and a few seconds of it in `make test`."""
