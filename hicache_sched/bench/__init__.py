"""Measurements: `python -m hicache_sched bench`. Both sides of a ratio are measured in one run, in turns."""
