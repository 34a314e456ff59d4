"""Errors of several modules."""


class RetryableError(ValueError):
    """Neither settings nor data are at fault, and another attempt may succeed."""
