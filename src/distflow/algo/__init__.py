"""The mathematics of learning: rewards and advantages, KL and its weight, losses, and how tokens weigh in one.

Pure functions of tensors, no workers.
"""
