"""What is done with completions without training: `megagrpo evaluate`, `megagrpo sample`.

The engine reads an HF folder itself; a checkpoint, in any layout, is read into stages and published to it,
as a run does, without gradients and without an optimizer; a server at a given address is asked as it is.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megagrpo.config.model_folder import is_megatron_checkpoint
from megagrpo.config.schema import Config
from megagrpo.device.device import set_deterministic
from megagrpo.evaluation.evaluator import Evaluator
from megagrpo.evaluation.prompt_digests import find_contamination
from megagrpo.evaluation.results import build_table, describe_results, print_table
from megagrpo.parallel.groups import all_gather_metadata, build_groups, destroy_groups
from megagrpo.parallel.layout import build_layout
from megagrpo.policy.reference import Reference
from megagrpo.rollout.accepted import (
    AcceptanceRule,
    AcceptedCounts,
    accepted_rows,
    merge_parts,
    part_file,
    write_rows,
)
from megagrpo.rollout.data_identity import check_same_on_ranks
from megagrpo.rollout.failed_scores import count_scores
from megagrpo.rollout.generation import RolloutGenerator
from megagrpo.rollout.in_flight import RolloutRequest, sampling_by_source, sampling_of_run
from megagrpo.run_inputs import RunInputs, read_inputs
from megagrpo.serving import build_batches, build_generator, build_rewards, connect_weights, load_model
from megagrpo.supervision.run_lock import hold_run_folder
from megagrpo.supervision.supervisor import Supervisor
from megagrpo.telemetry.activity import Activity
from megagrpo.telemetry.completions import Samples, write_completions
from megagrpo.telemetry.display import Display
from megagrpo.telemetry.evaluation_files import evaluation_file, write_evaluation
from megagrpo.types import Prompt


@dataclass(frozen=True)
class Sampler:
    """An engine that serves the weights that are asked for, with what is sampled from it."""

    inputs: RunInputs
    generator: RolloutGenerator
    is_first: bool  # among all ranks
    print: Callable[[str], None]  # on the first rank


@contextmanager
def open_sampler(
    config: Config, device: torch.device, supervisor: Supervisor, display: Display | None
) -> Iterator[Sampler]:
    """Build what samples and scores, and take it down again. Collective over all ranks.

    Raises:
        UserError: anything about the model, the data or the rewards that the user can mend.
    """
    activity = display.activity if display else Activity(0)
    say = (lambda line: print(line, flush=True)) if display else (lambda line: None)
    supervisor.enter("start")
    activity.build("tokenizer and data")
    set_deterministic(config.run.deterministic)
    inputs = read_inputs(config, say)
    rewards = build_rewards(config, inputs)
    layout = build_layout(config.parallel, int(os.environ.get("WORLD_SIZE", "1")))
    groups = build_groups(layout, config.run.collective_timeout_seconds)
    check_same_on_ranks(inputs.prompts)
    lock = hold_run_folder(Path(config.run.dir))
    is_published = is_megatron_checkpoint(config.model_folder)
    generator = build_generator(
        config,
        inputs,
        groups,
        rewards,
        device,
        building=activity.build,
        counts=activity.count,
        note=say,
        load_weights=not is_published,
    )
    publisher = None
    if is_published:
        activity.build("the model")
        model = Reference(load_model(config, inputs, groups, device))
        builder = build_batches(config, inputs, layout, groups.cp_rank, device)
        publisher = connect_weights(config, inputs, model, builder, generator, building=activity.build)
        publisher.publish(0)
    supervisor.leave("start", 0.0)
    try:
        yield Sampler(inputs, generator, groups.rank == 0, say)
        destroy_groups()
    except Exception as error:
        supervisor.fail(error)  # before engines and workers are closed: the other ranks wait for the cause
        raise
    finally:
        generator.rewards.close()
        if publisher is not None:
            publisher.close()
        generator.engine.close()
        lock.release()


def evaluate(config: Config, device: torch.device, supervisor: Supervisor, display: Display | None) -> None:
    """Evaluate all sets of a configuration, as a run does, and write `evaluations/step_000000.json`, a table
    and the completions. Collective over all ranks.
    """
    run_dir = Path(config.run.dir)
    with open_sampler(config, device, supervisor, display) as sampler:
        inputs = sampler.inputs
        sets, seed = inputs.evaluation_prompts, config.run.seed
        evaluator = Evaluator(sampler.generator, sets, config.rollout, seed, every=0, num_steps=0)

        def keep(name: str, samples: Callable[[], Samples]) -> None:
            if sampler.is_first:
                write_completions(run_dir, 0, samples(), config.telemetry.completions_count, name)

        with supervisor.phase("evaluate"):
            outcomes = evaluator.run(keep)
        if not sampler.is_first:
            return
        results = describe_results(outcomes, model=_name_weights(config), step=0)
        for set_config, prompts in sets:
            results["sets"][set_config.name]["contamination"] = _describe_contamination(inputs, prompts)
        path = evaluation_file(run_dir, 0)
        write_evaluation(path, results)
        print_table(build_table(results))
        sampler.print(f"results in {path}")


def sample(
    config: Config,
    device: torch.device,
    supervisor: Supervisor,
    display: Display | None,
    *,
    min_reward: float,
    per_prompt: int,
) -> None:
    """Sample the training prompts, each once, and write the completions that pass as rows of an SFT set, with
    `summary.json`. Collective over all ranks.

    Args:
        min_reward: a completion passes from this reward on.
        per_prompt: most completions that are kept of a prompt; 0: all.
    """
    folder, rule, counts = Path(config.run.dir), AcceptanceRule(min_reward, per_prompt), AcceptedCounts()
    with open_sampler(config, device, supervisor, display) as sampler, supervisor.phase("sample"):
        groups = sampler.generator.groups
        part = part_file(folder, groups.rank)
        part.write_bytes(b"")
        sampling = sampling_of_run(config.rollout, config.run.seed)
        about = {"model": _name_weights(config), "temperature": sampling.temperature, "seed": sampling.seed}
        prompts, size = sampler.inputs.source.prompts, config.rollout.prompts_per_step
        for first in range(0, len(prompts), size):
            request = RolloutRequest(
                prompts[first : first + size],
                sampling,
                config.rollout.completions_per_prompt,
                by_source=sampling_by_source(config.data, sampling),
            )
            rollouts = sampler.generator.generate(request)
            count_scores(rollouts).require_any(f"prompts {first} to {first + len(request.prompts) - 1}")
            rows = list(accepted_rows(rollouts, rule, about))
            write_rows(part, rows)
            counts.kept += len(rows)
            counts.add(rollouts, rule)
        counts.kept = sum(all_gather_metadata(counts.kept))  # all parts are whole now
        if sampler.is_first:
            path = merge_parts(folder, groups.world_size)
            summary = asdict(counts) | {"pass_rate": counts.passing / counts.completions}
            (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
            sampler.print(f"{path}: {counts.describe()}")


def _name_weights(config: Config) -> str:
    given = config.engine.given_addresses
    return (
        ", ".join(given) if given and not is_megatron_checkpoint(config.model_folder) else config.model.path
    )


def _describe_contamination(inputs: RunInputs, prompts: list[Prompt]) -> dict[str, Any]:
    found = find_contamination(inputs.source.prompts, prompts)
    return {"prompts": len(found), "of": len(prompts), "ids": found[:100]}


TASKS_BY_NAME: dict[str, Callable[..., None]] = {"evaluate": evaluate, "sample": sample}
