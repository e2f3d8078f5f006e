"""The commands `megagrpo evaluate` and `megagrpo sample`, which launch ranks that do not train."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from megagrpo.errors import UserError
from megagrpo.supervision import exit_codes
from megagrpo.supervision.launch import Launch
from megagrpo.supervision.run_folder import ACCEPTED, make_run_folder

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.FIELD=VALUE]...", help="values that win over the file"),
]
Nproc = Annotated[
    int | None, typer.Option(min=1, help="processes to start; default: one replica, tp * pp * cp")
]


def evaluate(
    config: Annotated[Path | None, typer.Argument(help="YAML file of a run, with evaluation.sets")] = None,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="folder of the results")] = Path("runs/evaluate"),
    nproc: Nproc = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="evaluate nothing: compare two results (files, or folders of runs)"),
    ] = None,
) -> None:
    """Evaluate model.path (an HF folder, a checkpoint), or the server at engine.server.addresses, on
    evaluation.sets.

    Results: OUT/evaluations/step_000000.json, a table, completions.
    """
    if compare is not None:
        _compare(*compare)
        return
    if config is None:
        raise UserError("evaluate: a configuration is needed, or --compare A B")
    _launch("evaluate", config, [*(overrides or []), f"run.dir={out}"], nproc, needs_sets=True)


def sample(
    config: Annotated[Path, typer.Argument(help="YAML file of a run")],
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="folder of the file, which must not be there")] = Path(
        "runs/sample"
    ),
    nproc: Nproc = None,
    min_reward: Annotated[float, typer.Option(help="a completion passes from this reward on")] = 1.0,
    per_prompt: Annotated[
        int, typer.Option(min=0, help="most that are kept of a prompt, the best, then the shortest; 0: all")
    ] = 0,
) -> None:
    """Sample the training prompts from model.path or a server, and write the completions that pass as an SFT
    set.

    OUT/accepted.jsonl: prompt, completion and metadata a line; OUT/summary.json: counts.
    """
    if (out / ACCEPTED).exists():
        raise UserError(f"--out: {out / ACCEPTED}: is there already")
    _launch(
        "sample",
        config,
        [*(overrides or []), f"run.dir={out}"],
        nproc,
        min_reward=min_reward,
        per_prompt=per_prompt,
    )


def _compare(first: Path, second: Path) -> None:
    from megagrpo.evaluation.comparison import build_comparison_table, compare_results
    from megagrpo.evaluation.results import print_table, read_results

    comparisons = compare_results(read_results(first), read_results(second))
    print_table(build_comparison_table(comparisons, (str(first), str(second))))


def _launch(
    task: str,
    path: Path,
    overrides: Sequence[str],
    nproc: int | None,
    needs_sets: bool = False,
    **options: Any,
) -> None:
    """Check the configuration, then start the ranks and wait for them; leave with their code."""
    import json

    with Launch() as launch:
        from megagrpo.planning.preflight import prepare_run

        config, num_ranks = prepare_run(path, overrides, nproc)
        if needs_sets and not config.evaluation.sets:
            raise UserError(f"evaluation.sets: {path}: has none, so there is nothing to evaluate")
        make_run_folder(Path(config.run.dir))
        code = launch.run(
            [task, str(path), *overrides, "--options", json.dumps(options)],
            num_ranks,
            module="megagrpo.generate",
        )
    if code != exit_codes.DONE:
        raise typer.Exit(code)
