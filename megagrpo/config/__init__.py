"""A run as one frozen, typed value."""
