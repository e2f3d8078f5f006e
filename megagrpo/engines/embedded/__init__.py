"""The engine that lives in the ranks."""
