"""Python for policies: each piece of code runs in its own process, which is forked, confined and ended."""
