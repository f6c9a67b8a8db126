"""How workers are started: by `distflow run` on one machine, or by torchrun, Slurm and the like."""
