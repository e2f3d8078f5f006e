"""Distributed checkpoints that any layout reads, and conversion to and from HF folders."""
