"""Replay: rebuild one optimizer step from a checkpoint and the recorded groups, without engine or bus."""
