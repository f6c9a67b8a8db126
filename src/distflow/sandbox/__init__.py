"""Runs untrusted Python. Imports nothing itself: the jail loads this package with the standard library alone."""
