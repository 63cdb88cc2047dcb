"""Runs the processes of a run on a Ray cluster: each as an actor that starts, watches and ends it on its host."""
