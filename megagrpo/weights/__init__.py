"""From the actor's shards to the rollout engines, as one transaction per version."""
