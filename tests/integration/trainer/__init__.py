"""The trainer on a real bus: its data, groups, loop, replays and trackers."""
