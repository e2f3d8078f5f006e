"""Engines in processes of their own that die and come back, above publishing and rollouts."""
