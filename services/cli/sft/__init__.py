"""`penstock sft`."""
