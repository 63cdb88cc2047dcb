"""`make results`: the runs behind docs/results.md, their tables and their plots."""
