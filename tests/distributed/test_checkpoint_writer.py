"""A checkpoint is written by the rank itself: no forked writer, whose silent death would leave the rank
waiting for ever.
"""

import subprocess
import sys
import textwrap

import pytest


@pytest.mark.distributed
def test_saving_forks_no_process_and_tells_a_full_disk(tmp_path):
    code = textwrap.dedent(
        """
        import multiprocessing, os, sys
        from megagrpo.device import device
        device.setup()
        import multiprocessing.process
        def refuse(self): raise AssertionError("a process was started")
        multiprocessing.process.BaseProcess.start = refuse
        from megagrpo.checkpoint.hf import convert_hf_to_megatron
        from megagrpo.config.training_sections import ModelConfig
        from torch.distributed.checkpoint import filesystem
        convert_hf_to_megatron(ModelConfig(path="examples/quickstart/model"), sys.argv[1] + "/good")
        from megatron.core.dist_checkpointing.strategies import filesystem_async
        def full(*arguments, **options): raise OSError(28, "No space left on device")
        filesystem_async._write_item = full
        convert_hf_to_megatron(ModelConfig(path="examples/quickstart/model"), sys.argv[1] + "/bad")
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=200
    )
    assert (tmp_path / "good" / ".metadata").is_file(), done.stderr
    assert done.returncode != 0 and "No space left on device" in done.stderr
    assert not (tmp_path / "bad").exists()
