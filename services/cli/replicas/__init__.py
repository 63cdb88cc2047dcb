"""`penstock replicas`: shows and drains the engines of a run."""
