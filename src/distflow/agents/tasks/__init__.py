"""Tasks as folders: an instruction, files to begin with, and tests that write a reward, in Harbor's format."""
