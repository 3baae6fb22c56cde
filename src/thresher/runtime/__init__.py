"""Runtimes: execute a run in this process, on the workers of a Ray cluster, or on the processes of torchrun or srun."""
