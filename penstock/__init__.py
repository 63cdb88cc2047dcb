"""Penstock: fully asynchronous GRPO post-training of vision-language models on verifiable rewards."""

import os

# Set before gRPC is imported. Its fork handlers start threads in a child that is about to execute another program, and
# one child in a hundred aborts there; no process here uses gRPC on both sides of a fork.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Otherwise each client writes a line to stderr when a server that it calls ends: what that means is in our own logs.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
