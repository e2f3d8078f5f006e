"""What a run records."""
