"""`penstock sft`: supervised training."""
