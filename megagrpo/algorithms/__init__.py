"""Rewards become advantages, log-probs per-token losses, and one reducer makes the loss of them."""
