"""Counts of what follows what in training: rows of their own, and a second part of any model's score."""
