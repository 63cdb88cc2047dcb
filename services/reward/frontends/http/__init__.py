"""The HTTP face: a JSON mirror of the contract, and what slime and OpenRLHF ask."""
