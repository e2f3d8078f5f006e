"""What a run will do and need, computed from its configuration before anything is built."""
