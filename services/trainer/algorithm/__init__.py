"""The mathematics of GRPO: advantages, loss and metrics. No I/O."""
