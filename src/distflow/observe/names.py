"""Names in the folder of a run that both those who record and those who read use. Imports nothing."""

SPANS, SAMPLES = "spans", "samples"  # folders, with a file for each rank
TRAIN, HELD_OUT = "train", "held-out"  # the split of a sample
