"""The output layer of a policy without its logits."""
