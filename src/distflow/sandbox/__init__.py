"""Runs untrusted Python. Imports the standard library alone, so it can be read and used without the rest."""
