"""What runs inside vLLM."""
