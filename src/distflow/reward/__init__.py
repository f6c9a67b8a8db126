"""Reward functions: users' own code, unmodified, run in separate processes. Importing this imports no torch."""
