"""`penstock train`: starts the processes of a run, keeps them running, shows progress, and stops them."""
