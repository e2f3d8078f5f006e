"""What of ours runs inside the servers of vLLM and SGLang, under their Python."""
