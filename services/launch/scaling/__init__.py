"""`penstock scale`: changes how many engines and workers a run has while it goes on."""
