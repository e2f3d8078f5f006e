"""The vocab-parallel output layer at TP 1, 2 and 4 over gloo, all cases in one launch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "workers" / "logprobs_worker.py"


@pytest.mark.distributed
def test_every_tensor_parallel_size_equals_the_dense_reference():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
    # Start-up of four ranks takes 5 to 20 s on a busy machine, the cases 1 s; a hang is a dead rank in a collective.
    result = subprocess.run([*command, str(WORKER)], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-4000:]
