"""Reads the slices that a rank sends from its live weights."""
