"""Runs code that a model wrote: its process reads its interpreter, writes one folder, and nothing else."""
