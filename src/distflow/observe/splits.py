"""The splits that a sample is of. Imports nothing."""

TRAIN, HELD_OUT = "train", "held-out"
