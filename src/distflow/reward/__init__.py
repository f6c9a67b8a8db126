"""Rewards: the user's functions, unmodified, in processes of their own. Importing this imports no torch."""
