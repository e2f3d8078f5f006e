"""What the trainer and an engine's processes both know."""
