"""What depends on the device: what it offers, what is chosen for it and why, and the memory that a run needs on it."""
