"""Starts an SGLang server that a trainer can feed: `python sglang_server.py --model-path ... (SGLang's own
arguments)`.

With --end-with-parent before them the server ends when the process that started it does
(host/parent_watch.py); with --offline after that it is `sglang.Engine` behind a loop of ours (sglang_offline)
in place of SGLang's HTTP server. Runs in the engine's Python environment, where megagrpo is not installed,
and is started by its path. SGLang spawns its scheduler processes, which import this file again as
`__mp_main__`: what stands at the top level is in place in all of them.

Four things are added to SGLang: stand-ins for CUDA-only imports on a CPU (sglang_shims), sampling by counters
    (sglang_sampler),
weights by manifest (sglang_updates), and a gate for requests while a new version is verified (sglang_gate).
"""

import os
import sys

import sglang_shims
from parent_watch import watch_parent

sglang_shims.install_cpu_shims()  # before anything of sglang is imported

import sglang_gate  # noqa: E402
import sglang_sampler  # noqa: E402
import sglang_updates  # noqa: E402

sglang_shims.install_late_cpu_shims()
sglang_sampler.install()
sglang_updates.install()
sglang_gate.install()


def main(arguments: list[str]) -> None:
    """Serve until killed; every process of the server ends with this one."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    if arguments[:1] == ["--end-with-parent"]:
        watch_parent()
        arguments = arguments[1:]
    if arguments[:1] == ["--offline"]:
        from sglang_offline import run

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
