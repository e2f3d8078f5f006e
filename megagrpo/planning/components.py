"""Checks of the names and options that registries know. Imports torch (with the algorithms), builds
nothing.
"""

import inspect
from collections.abc import Iterator

from megagrpo.algorithms.checks import check_algorithm_config
from megagrpo.algorithms.losses import LOSSES
from megagrpo.config.schema import Config, RewardConfig
from megagrpo.engines import ENGINES
from megagrpo.engines.server.python_environment import PACKAGES, find_python
from megagrpo.errors import ConfigError, UserError
from megagrpo.registry import suggestion
from megagrpo.rewards.build import is_custom
from megagrpo.rewards.reward import REWARDS


def verify_components(config: Config) -> None:
    """Look every configured component up.

    Rewards are not built and users' own are not imported: both happen in the worker processes that run them.

    Raises:
        ConfigError: all mistakes, one line each.
    """
    problems = check_algorithm_config(
        config.algorithm, config.rollout.completions_per_prompt, config.rollout.max_new_tokens
    )
    problems += _check_off_policy(config)
    try:
        ENGINES.get(config.engine.name)
        if config.engine.name in PACKAGES and not config.engine.addresses:
            find_python(config.engine.python, PACKAGES[config.engine.name])
    except UserError as error:
        problems.append(str(error) if str(error).startswith("engine.") else f"engine.name: {error}")
    for position, reward in enumerate(config.rewards.functions):
        problems.extend(_check_reward(f"rewards.functions.{position}", reward))
    if problems:
        raise ConfigError(problems)


def _check_off_policy(config: Config) -> Iterator[str]:
    """Old log-probs of the engine correct nothing in a loss that has no ratio; whether it has one, its
    registry knows.
    """
    algorithm = config.algorithm
    if (
        config.rollout.max_policy_age == 0
        or algorithm.correction.enabled
        or algorithm.loss not in LOSSES.names()
    ):
        return
    if not LOSSES.get(algorithm.loss).uses_old_logprobs:
        yield (
            f"algorithm.loss: {algorithm.loss}: has no ratio, so nothing corrects for the older weights of "
            f"rollout.off_policy {config.rollout.off_policy}; set algorithm.correction (say, importance: "
            "token)"
        )


def _check_reward(place: str, reward: RewardConfig) -> Iterator[str]:
    if is_custom(reward.name):
        return
    try:
        parameters = inspect.signature(REWARDS.get(reward.name)).parameters
    except UserError as error:
        yield f"{place}.name: {error}"
        return
    for option in reward.options:
        if option not in parameters:
            yield (
                f"{place}.options.{option}: not an option of "
                f"{reward.name}{suggestion(option, list(parameters))}; "
                f"its options: {', '.join(parameters) or 'none'}"
            )
