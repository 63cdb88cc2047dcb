"""What is deployed: the wheel, the compose stack, and the probe that containers ask."""
