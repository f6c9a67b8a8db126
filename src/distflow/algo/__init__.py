"""The mathematics of learning: advantages, KL, losses, and how tokens weigh in one. Pure tensors, no workers."""
