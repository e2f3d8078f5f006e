"""Held-out sets, sampled and scored with the run's own engines and rewards."""
