"""The names of the splits. Imports nothing."""

TRAIN, HELD_OUT = "train", "held-out"
