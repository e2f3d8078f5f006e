"""Checks of a mixture: whether rewards and sources fit together. Imports no torch."""

from collections.abc import Iterator

from megagrpo.config.rollout_sections import DataConfig, RewardsConfig
from megagrpo.registry import suggestion


def check_sources(data: DataConfig, rewards: RewardsConfig) -> Iterator[str]:
    """Yield one line for each source that no reward scores, and each that a reward names and is not there."""
    names, functions = [each.name for each in data.mixture], rewards.functions
    for position, reward in enumerate(functions if names else ()):
        for name in reward.sources:
            if name not in names:
                yield (
                    f"rewards.functions.{position}.sources: {name}: no source of data.mixture"
                    f"{suggestion(name, names)}; they are {', '.join(names)}"
                )
    for place, name in enumerate(names):
        if not any(not reward.sources or name in reward.sources for reward in functions):
            yield f"data.mixture.{place}.name: {name}: no reward scores it (rewards.functions.N.sources)"
