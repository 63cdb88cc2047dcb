"""`penstock replicas`: the engines of a run."""
