"""Rollout: the engines that generate and the workers that play episodes."""
