"""The launcher and the processes of its runs."""
