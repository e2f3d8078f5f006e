"""Starts an SGLang server that a trainer can feed: `python -m megagrpo.host.sglang.server --model-path ...
(SGLang's own arguments)`.

With --end-with-parent before them the server ends when the process that started it does
(host/parent_watch.py); with --offline after that it is `sglang.Engine` behind a loop of ours (offline)
in place of SGLang's HTTP server. Runs in the engine's Python environment, where megagrpo is not installed,
and is started by its path. SGLang spawns its scheduler processes, which import this file again as
`__mp_main__`: what stands at the top level is in place in all of them.

Four things are added to SGLang: stand-ins for CUDA-only imports on a CPU (shims), sampling by counters
(sampler), weights by manifest (updates), and a gate for requests while a new version is verified (gate).
"""

import os
import sys

from megagrpo.host.parent_watch import watch_parent
from megagrpo.host.sglang import shims

shims.install_cpu_shims()  # before anything of sglang is imported

from megagrpo.host.sglang import gate, sampler, updates  # noqa: E402

shims.install_late_cpu_shims()
sampler.install()
updates.install()
gate.install()


def main(arguments: list[str]) -> None:
    """Serve until killed; every process of the server ends with this one."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    if arguments[:1] == ["--end-with-parent"]:
        watch_parent()
        arguments = arguments[1:]
    if arguments[:1] == ["--offline"]:
        from megagrpo.host.sglang.offline import run

        arguments = arguments[1:]
    else:
        from sglang.launch_server import run_server as run
    load_plugins()
    try:
        run(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
