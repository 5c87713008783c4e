"""Engines and model libraries that the scheduler fits into; each module needs the extra of its name."""
