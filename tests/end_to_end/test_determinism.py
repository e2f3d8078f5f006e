"""Two runs of one configuration are equal to the bit on the CPU, with and without the switch."""

import pytest

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def runs(run_all):
    """Four runs of three steps on two data parallel ranks: two with the switch, two without."""
    settings = [
        "run.steps=3",
        "parallel.tp=1",
        "update.mini_batches_per_step=2",
        "telemetry.writers=[jsonl]",
    ]
    return run_all(
        2,
        {
            f"{switch}_{number}": [*settings, f"run.deterministic={switch}"]
            for switch in ("true", "false")
            for number in (1, 2)
        },
    )


@pytest.mark.parametrize("switch", ["true", "false"])
def test_two_runs_are_equal_to_the_bit(runs, rows_of, switch):
    first, second = runs[f"{switch}_1"], runs[f"{switch}_2"]
    assert rows_of(first) == rows_of(second) and len(rows_of(first)) == 4
    assert (first / "hf" / "model.safetensors").read_bytes() == (
        second / "hf" / "model.safetensors"
    ).read_bytes()
