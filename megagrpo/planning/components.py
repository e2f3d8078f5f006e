"""Checks of the names and options that registries know. Imports torch (with the algorithms), builds
nothing.
"""

import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any

from megagrpo.algorithms.algorithm_checks import check_algorithm_config
from megagrpo.algorithms.losses import LOSSES
from megagrpo.config.algorithm_section import AlgorithmConfig
from megagrpo.config.model_folder import hf_folder_of
from megagrpo.config.rollout_sections import RewardConfig, RewardsConfig, RolloutConfig
from megagrpo.config.schema import Config
from megagrpo.config.training_sections import ModelConfig
from megagrpo.engines import ENGINES
from megagrpo.engines.server.command import PACKAGES, find_python
from megagrpo.errors import ConfigError, UserError
from megagrpo.evaluation.score_metrics import EVALUATION_METRICS
from megagrpo.models.families import load_all
from megagrpo.models.family import FAMILIES, use_own_family
from megagrpo.planning.file_checks import read_hf_config
from megagrpo.registry import Registry, suggestion
from megagrpo.rewards.build import is_custom
from megagrpo.rewards.pool import RewardPool
from megagrpo.rewards.reward import REWARDS
from megagrpo.telemetry.writers import WRITERS


def verify_components(config: Config, is_elsewhere: bool = False) -> None:
    """Look every configured component up.

    Args:
        config: of the run.
        is_elsewhere: an engine need not be installed here.

    Rewards are not built and users' own are not imported: both happen in the worker processes that run them.

    Raises:
        ConfigError: all mistakes, one line each.
    """
    problems = check_algorithm_config(
        config.algorithm, config.rollout.completions_per_prompt, config.rollout.max_new_tokens
    )
    problems += _check_off_policy(config.rollout, config.algorithm)
    problems += _check_family(config.model)
    try:
        ENGINES.find(config.engine.name)
        if config.engine.name in PACKAGES and not (config.engine.given_addresses or is_elsewhere):
            find_python(config.engine.server.python, PACKAGES[config.engine.name])
    except UserError as error:
        problems.append(str(error) if str(error).startswith("engine.") else f"engine.name: {error}")
    for name in config.telemetry.writers:
        problems += _check_found("telemetry.writers", WRITERS, name)
    if "wandb" in config.telemetry.writers and importlib.util.find_spec("wandb") is None:
        problems.append("telemetry.writers: wandb: the package is missing: pip install 'megagrpo[wandb]'")
    for position, held_out in enumerate(config.evaluation.sets):
        for name in held_out.metrics:
            problems += _check_found(f"evaluation.sets.{position}.metrics", EVALUATION_METRICS, name)
    for position, reward in enumerate(config.rewards.functions):
        problems.extend(_check_reward(f"rewards.functions.{position}", reward))
    if problems:
        raise ConfigError(problems)


def _check_off_policy(rollout: RolloutConfig, algorithm: AlgorithmConfig) -> Iterator[str]:
    """Old log-probs of the engine correct nothing in a loss that has no ratio; whether it has one, its
    registry knows.
    """
    if rollout.max_policy_age == 0 or algorithm.correction.enabled or algorithm.loss not in LOSSES.names():
        return
    if not LOSSES.get(algorithm.loss).uses_old_logprobs:
        yield (
            f"algorithm.loss: {algorithm.loss}: has no ratio, so nothing corrects for the older weights of "
            f"rollout.off_policy {rollout.off_policy}; set algorithm.correction (say, importance: "
            "token)"
        )


def verify_own_rewards(rewards: RewardsConfig) -> None:
    """Load the rewards that are user code in a worker process, and check how they can be called.

    Raises:
        ConfigError: the first that can't be loaded or called.
    """
    for position, reward in enumerate(rewards.functions):
        if not is_custom(reward.name):
            continue
        try:
            RewardPool(rewards.model_copy(update={"functions": (reward,), "workers": 1})).close()
        except UserError as error:
            raise ConfigError([f"rewards.functions.{position}.name: {error}"]) from error


def _check_found(place: str, registry: Registry[Any], name: str) -> Iterator[str]:
    try:
        registry.find(name)
    except UserError as error:
        yield f"{place}: {error}"


def _check_family(model: ModelConfig) -> Iterator[str]:
    """Unknown architectures, and fields of config.json that change the maths and are not supported."""
    raw = read_hf_config(model)
    if raw is None:
        return  # told with the files
    load_all()
    name = raw.get("model_type")
    if model.family is not None:
        try:
            use_own_family(model.family, str(name))
        except UserError as error:
            yield f"model.family: {error}"
        return
    if name in FAMILIES.names():
        return
    sees = {"vision_config", "vision_start_token_id", "image_token_id"} & set(raw)
    what = "a model that sees images: they are not supported" if sees else "no architecture of this version"
    folder = hf_folder_of(model.path)
    yield (
        f"model.path: {folder}/config.json: model_type {name!r} is {what}; supported: "
        f"{', '.join(FAMILIES.names())}; model.family names one of yours, FILE.py:CLASS"
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
