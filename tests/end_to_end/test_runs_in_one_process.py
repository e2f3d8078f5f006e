"""Several runs in one process: what one has built is gone before the next one."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(300)]

CODE = """
import gc, os, sys
from megagrpo.device import device
rank_device = device.setup()
import torch
from megagrpo.config.load import load_config
from megagrpo.run import run_training

def threads():
    return [open(f'/proc/self/task/{each}/comm').read().strip() for each in os.listdir('/proc/self/task')]

for number in range(2):
    overrides = [*sys.argv[2:], f'run.dir={sys.argv[1]}/{number}']
    config = load_config('examples/quickstart/quickstart.yaml', overrides)
    run_training(config, rank_device)
    gc.collect()
    parameters = sum(isinstance(each, torch.nn.Parameter) for each in gc.get_objects())
    print(sum('gloo' in name for name in threads()), len(threads()), parameters, file=sys.stderr)
"""
SMALL = [
    "parallel.tp=1",
    "run.steps=1",
    "rollout.prompts_per_step=2",
    "rollout.completions_per_prompt=2",
    "evaluation.every=0",
    "evaluation.sets.0.limit=2",
    "evaluation.sets.1.limit=2",
]


def test_a_run_leaves_no_thread_of_a_group_and_no_parameter_behind(tmp_path):
    """Hooks on gradient accumulators once kept 51 threads and the whole model of each run."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path), *SMALL], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    (gloo, threads, parameters), (gloo_then, threads_then, parameters_then) = (
        map(int, line.split()) for line in done.stderr.splitlines()[-2:]
    )
    assert (gloo, gloo_then) == (0, 0)
    assert threads_then <= threads
    assert parameters_then <= parameters
