"""A run as a Slurm job: which node gets which processes, the sbatch file, and what nodes other than the first run."""
