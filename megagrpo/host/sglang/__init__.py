"""What runs inside SGLang."""
