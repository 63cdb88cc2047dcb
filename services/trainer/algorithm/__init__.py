"""The mathematics of GRPO: advantages, loss, and what is measured about tokens. No I/O."""
