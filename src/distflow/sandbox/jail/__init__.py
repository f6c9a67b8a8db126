"""The process that isolates and runs programs. Standard library only: it is started without site-packages."""

MEMORY_EXIT_CODE = 77  # of a program that ended with a MemoryError
