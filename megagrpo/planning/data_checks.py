"""Checks of the first rows of each data set, before the ranks are launched: some mistakes would otherwise
show after the first rollout. Imports no torch.
"""

import inspect
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from megagrpo.config.rollout_sections import DataConfig, RewardsConfig
from megagrpo.config.schema import Config
from megagrpo.errors import ConfigError, UserError
from megagrpo.registry import suggestion
from megagrpo.rewards.build import REWARDS
from megagrpo.rollout.data_sources import DATA_SOURCES, find_source, read_rows


def verify_data(config: Config) -> None:
    """Read the first rows of each file and load each function that returns rows, which is not called.

    Raises:
        ConfigError: all mistakes, one line each.
    """
    data, rewards = config.data, config.rewards
    wanted = 1 if data.mixture else config.rollout.prompts_per_step
    problems = [
        problem
        for place, part in data.parts
        for problem in _check_set(place, part.source, data, rewards, wanted, part.name)
    ]
    for position, held_out in enumerate(config.evaluation.sets):
        place = f"evaluation.sets.{position}.source"
        problems += _check_set(place, held_out.source, data, rewards, num_prompts=1)
    if problems:
        raise ConfigError(problems)


def _check_set(
    place: str, source: str, data: DataConfig, rewards: RewardsConfig, num_prompts: int, name: str = ""
) -> Iterator[str]:
    try:
        if DATA_SOURCES.is_own_code(source):
            find_source(source)
            return
        limit = data.limit if place.startswith("data.") else None
        rows = list(islice(read_rows(place, source, limit), num_prompts))
    except UserError as error:
        text = str(error)
        yield text if text.startswith(f"{place}: ") else f"{place}: {text}"
        return
    if not rows:
        yield f"{place}: {source}: no rows"
        return
    if len(rows) < num_prompts:
        yield (
            f"rollout.prompts_per_step: {num_prompts}: {source} has {len(rows)} rows, so a step would hold "
            "a prompt twice; take fewer, or add rows"
        )
    yield from _check_columns(f"{place}: {source}", rows[0], data.prompt_field, rewards, name)


def _check_columns(
    place: str, row: Mapping[str, Any], prompt_field: str, rewards: RewardsConfig, name: str
) -> Iterator[str]:
    columns = f"its columns: {', '.join(map(str, row)) or 'none'}"
    if prompt_field not in row:
        near = suggestion(prompt_field, list(map(str, row)))
        yield f"{place}: no column {prompt_field!r} (data.prompt_field){near}; {columns}"
    for position, reward in enumerate(rewards.functions):
        scores_it = not reward.sources or (name or row.get("source")) in reward.sources
        if reward.name not in REWARDS.names() or not scores_it:
            continue
        parameter = inspect.signature(REWARDS.get(reward.name)).parameters.get("column")
        if parameter is None:
            continue
        column = reward.options.get("column", parameter.default)
        if column not in row:
            yield (
                f"{place}: no column {column!r}, which reward {reward.name} compares with "
                f"(rewards.functions.{position}.options.column){suggestion(column, list(map(str, row)))}; "
                f"{columns}"
            )
