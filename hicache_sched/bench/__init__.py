"""Measurements: `python -m hicache_sched bench`. Every figure is a ratio of two sides measured in one run."""
