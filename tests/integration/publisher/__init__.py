"""The publisher of weights over simulated engines."""
