"""How every run starts: its configuration read and checked, threads set, its parts looked up. Used by
`megagrpo run` before the launch and by each rank after it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megagrpo.config.schema import Config


def prepare_run(
    config_file: str | Path,
    overrides: Sequence[str],
    num_ranks: int | None,
    ranks_on_host: int | None = None,
    is_elsewhere: bool = False,
    num_nodes: int = 1,
) -> tuple["Config", int]:
    """Read and check a run, and make the settings that must be made before torch is imported.

    Args:
        config_file: YAML file of the run.
        overrides: `section.field=value`.
        num_ranks: ranks of a machine; None: one replica, tp * pp * cp, over all of them.
        ranks_on_host: ranks that share this host's cores; None: this is no rank, it will launch them all.
        is_elsewhere: the run is planned for machines with GPUs, Transformer Engine and engines, which this
            one need not have.
        num_nodes: machines that a launch is for.

    Returns:
        (configuration, ranks).

    Raises:
        ConfigError: all mistakes that can be known before a model is built, one line each.
    """
    from megagrpo.config.hardware import ELSEWHERE
    from megagrpo.config.load import load_config
    from megagrpo.errors import ConfigError
    from megagrpo.planning.checks import verify_config
    from megagrpo.planning.data_checks import verify_data

    config = load_config(config_file, list(overrides))
    parallel = config.parallel
    num_ranks = num_nodes * num_ranks if num_ranks else parallel.tp * parallel.pp * parallel.cp
    if num_ranks % num_nodes:
        raise ConfigError([f"--nnodes {num_nodes}: does not divide {num_ranks} ranks; say --nproc"])
    verify_config(config, num_ranks, ELSEWHERE if is_elsewhere else None)
    verify_data(config)
    from megagrpo.device.environment import set_deterministic_environment, set_thread_environment

    if config.run.deterministic:
        set_deterministic_environment()
    set_thread_environment(ranks_on_host or num_ranks // num_nodes)  # ranks that are launched inherit it
    # the first import of torch
    from megagrpo.planning.components import verify_components, verify_own_rewards

    verify_components(config, is_elsewhere)
    if ranks_on_host is None:  # before a launch; ranks start their own workers anyway
        verify_own_rewards(config.rewards)
    return config, num_ranks
