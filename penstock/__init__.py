"""Penstock: fully asynchronous GRPO post-training of vision-language models on verifiable rewards."""
