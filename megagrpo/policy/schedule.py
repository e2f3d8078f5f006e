"""Learning-rate schedule: a pure function of the update count, so that a resume needs no state of its own."""

import math

from megagrpo.config.training_sections import OptimizerConfig


def learning_rate(config: OptimizerConfig, update: int, total_updates: int) -> float:
    """Return the learning rate of an optimizer update.

    Args:
        config: peak rate, warm-up, decay.
        update: updates done before this one, counted from 0.
        total_updates: updates of the whole run.
    """
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(1, total_updates - config.warmup_steps)
    progress = min(1.0, (update - config.warmup_steps) / span)
    kept = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_fraction + (1.0 - config.min_lr_fraction) * kept)
