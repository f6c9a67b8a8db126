"""A small Linux of its own for programs that start others: a private copy of an image, no network, no other process."""
