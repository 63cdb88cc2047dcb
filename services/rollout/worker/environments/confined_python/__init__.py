"""Python for policies: each piece of code runs in a process of its own, forked, confined and ended."""
