"""`penstock slurm`, and the command that its jobs run on nodes other than the first."""
