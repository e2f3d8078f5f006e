"""One step's learning."""
