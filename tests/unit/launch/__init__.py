"""Where the processes of a run go."""
