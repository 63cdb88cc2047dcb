"""`penstock train`: starts the processes of a run, keeps them going, shows how it goes, and ends them."""
