"""The `megagrpo` command. Torch is imported by what a command starts, not by the command line."""

import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from megagrpo import __version__
from megagrpo.checkpoint.convert_command import Direction
from megagrpo.checkpoint.convert_command import convert as convert_checkpoint
from megagrpo.cli_generate import evaluate, sample
from megagrpo.config.dashed_overrides import refuse_dashed_overrides
from megagrpo.config.run_sections import ExportDtype
from megagrpo.errors import UserError
from megagrpo.supervision import exit_codes
from megagrpo.supervision.launch import Launch
from megagrpo.supervision.nodes import Nodes, read_nodes
from megagrpo.supervision.redaction import redact
from megagrpo.supervision.run_folder import make_run_folder

LOOPBACK_NAMES = {"localhost", "127.0.0.1", "::1"}

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="RL post-training at Megatron scale.",
)


def main() -> None:
    """Run the command line; a mistake of the user's is printed in plain lines and leaves with code 2."""
    try:
        refuse_dashed_overrides(sys.argv[1:])
        app()
    except UserError as error:
        print(redact(str(error)), file=sys.stderr)
        sys.exit(exit_codes.USER_ERROR)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"megagrpo {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    """RL post-training at Megatron scale."""


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="YAML file to write")],
    model: Annotated[str, typer.Option(help="HF folder of the model")],
    data: Annotated[
        str | None, typer.Option(help="training rows; default: a small task, written beside the file")
    ] = None,
    reward: Annotated[str | None, typer.Option(help="reward: a name, or FILE.py:function")] = None,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of the run; 0: the CPU")] = 0,
    gpu_memory: Annotated[float, typer.Option(min=1, help="of one GPU, in GB")] = 80.0,
) -> None:
    """Write a commented configuration that trains as it is."""
    from megagrpo.planning.starter import write_starter

    for path in write_starter(file, model, data, reward, gpus, gpu_memory):
        print(f"{path} written")
    print(f"next: megagrpo run {file} --dry-run")


@app.command()
def config(
    word: Annotated[
        str | None, typer.Argument(help="a field, a section, a list of names, or a word to search for")
    ] = None,
) -> None:
    """Show fields with default and meaning, and the names that they take (presets, rewards, metrics, ...)."""
    from megagrpo.planning.config_help import describe

    print(describe(word))


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="YAML file of the run")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.FIELD=VALUE]...", help="values that win over the file"),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="processes to start; default: one replica, tp * pp * cp")
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="after a failure, start all ranks again from the newest checkpoint, at most this often",
        ),
    ] = 0,
    nnodes: Annotated[int, typer.Option(min=1, help="machines of the run; on each this is started")] = 1,
    node_rank: Annotated[int | None, typer.Option(min=0, help="of this machine, from 0")] = None,
    rendezvous: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="where all meet: an address of machine 0")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="open all inputs, say what the run would do; start nothing"),
    ] = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="with --dry-run: the whole resolved configuration too")
    ] = False,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="with --dry-run: plan for so many GPUs, which need not be here"),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(metavar="GB", help="with --dry-run and --gpus: count what one GPU of this size holds"),
    ] = None,
) -> None:
    """Train on this machine, or as one of several: check the configuration, then start the ranks.

    Ctrl-C, SIGTERM or SIGUSR1 saves and stops; Ctrl-C twice leaves at once.
    """
    with Launch() as launch:
        if dry_run:
            _dry_run(config, overrides or [], nproc, gpus, gpu_memory, show_config)
            return
        if gpus is not None or gpu_memory is not None or show_config:
            raise UserError("--gpus, --gpu-memory and --show-config are for --dry-run")
        nodes = read_nodes(nnodes, node_rank, rendezvous)
        if nodes is not None and max_restarts:
            raise UserError(
                "--max-restarts is for one machine; on several the scheduler starts the run again"
            )
        code = _run(launch, config, overrides or [], nproc, max_restarts, nodes)
    if code != exit_codes.DONE:
        raise typer.Exit(code)


def _dry_run(
    path: Path,
    overrides: list[str],
    nproc: int | None,
    gpus: int | None,
    gpu_memory: str | None,
    shows_config: bool,
) -> None:
    """Say what a run would do, here or on GPUs that are elsewhere."""
    from megagrpo.planning.dry_run import print_dry_run
    from megagrpo.planning.memory_table import read_gigabytes
    from megagrpo.planning.preflight import prepare_run

    if gpu_memory is not None and gpus is None:
        raise UserError("--gpu-memory: of how many GPUs? Say --gpus too")
    gpu_bytes = None if gpu_memory is None else read_gigabytes(gpu_memory)
    config, num_ranks = prepare_run(path, overrides, gpus or nproc, is_elsewhere=gpus is not None)
    print_dry_run(config, num_ranks, shows_config, gpu_bytes)


def _run(
    launch: Launch,
    path: Path,
    overrides: list[str],
    nproc: int | None,
    max_restarts: int,
    nodes: Nodes | None,
) -> int:
    """Check the configuration, then start the ranks and wait for them; return the exit code."""
    from megagrpo.planning.dry_run import describe_ranks
    from megagrpo.planning.preflight import prepare_run

    num_nodes = nodes.count if nodes else 1
    config, num_ranks = prepare_run(path, overrides, nproc, num_nodes=num_nodes)
    make_run_folder(Path(config.run.dir))
    print(
        f"starting {describe_ranks(config.parallel, num_ranks)}: {config.run.steps} steps of {path}",
        flush=True,
    )
    engines_are_local = {urlsplit(each).hostname for each in config.engine.given_addresses} <= LOOPBACK_NAMES
    return launch.run(
        [str(path), *overrides],
        num_ranks // num_nodes,
        max_restarts,
        engines_are_local=engines_are_local,
        nodes=nodes,
    )


app.command()(evaluate)
app.command()(sample)


@app.command()
def check_extension(
    place: Annotated[str, typer.Argument(help="FILE.py:name or package.module:name")],
    contract: Annotated[
        str | None, typer.Option(help="the one contract to try, as 'loss'; default: all")
    ] = None,
) -> None:
    """Try a part of your own (reward, loss, advantage estimator, model family, engine, metrics writer, data
    source, evaluation metric): which contract it meets, and where it fails.
    """
    from megagrpo.planning.contract_suites import SUITES
    from megagrpo.planning.extensions import check_extension as check

    if contract is not None and contract not in SUITES:
        raise UserError(f"--contract {contract!r}: must be one of {', '.join(SUITES)}")
    lines, is_met = check(place, contract)
    print("\n".join(lines))
    if not is_met:
        raise typer.Exit(exit_codes.USER_ERROR)


@app.command()
def doctor() -> None:
    """Show what this machine and this environment have, and what is missing for what."""
    from megagrpo.planning.doctor import format_doctor

    print(format_doctor())


@app.command()
def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="folders of runs")],
    out: Annotated[
        Path | None, typer.Option(help="file to write; default: report.html in the first folder")
    ] = None,
) -> None:
    """Write a page with the curves, warnings, completions and configuration of a run, or of several side by
    side; it opens without a network.
    """
    from megagrpo.telemetry.report import write_report

    print(write_report(run_dirs, out))


@app.command()
def show(
    run_dir: Annotated[Path, typer.Argument(help="folder of a run")],
    step: Annotated[int | None, typer.Option(help="default: the newest that was written")] = None,
    held_out: Annotated[str | None, typer.Option(help="evaluation set; default: training prompts")] = None,
    order: Annotated[str, typer.Option(help="prompt, best, worst, longest, mixed or changed")] = "prompt",
    text: Annotated[str, typer.Option(help="only groups with these words")] = "",
    count: Annotated[int, typer.Option(min=1, help="groups to print")] = 3,
) -> None:
    """Print completions of a run, whole groups with rewards, parts and gold answer."""
    from megagrpo.telemetry.show import show_completions

    show_completions(run_dir, step, held_out, order, text, count)


@app.command()
def convert(
    direction: Annotated[Direction, typer.Argument(help="hf-to-megatron or megatron-to-hf")],
    source: Annotated[Path, typer.Argument(help="folder to read")],
    target: Annotated[Path, typer.Argument(help="folder to write; must not exist")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[model.overrides.FIELD=VALUE]...",
            help="values that win over the source's config.json; model.ignore_fields=[FIELD] leaves one out",
        ),
    ] = None,
    dtype: Annotated[
        ExportDtype, typer.Option(help="of the weights, and in the config.json beside them")
    ] = "source",
) -> None:
    """Convert between an HF folder and a Megatron checkpoint, in this process (tools/convert_*.py take tp
    and pp under torchrun).
    """
    convert_checkpoint(direction, str(source), str(target), overrides or [], dtype=dtype)
    print(f"{target} written")


if __name__ == "__main__":  # the checkpoint writer spawns a process that imports this module again
    main()
