"""SGLang's scheduler, which decodes probes alone from a version's commit until it serves: all other requests
stay in the queue.

The gate is the same on all ranks of the engine: it is moved by instructions, which all of them follow between
two batches.
"""

from typing import Any

from megagrpo.wire.probe_requests import is_probe

_is_closed = False


def set_gate(closed: bool) -> None:
    """Hold back all requests but probes, or let all through, in this process."""
    global _is_closed
    _is_closed = closed


def install() -> None:
    """Put the gate before SGLang's choice of the next batch."""
    from sglang.srt.managers.scheduler import Scheduler

    choose = Scheduler.get_next_batch_to_run

    def get_next_batch_to_run(self: Any, *arguments: Any, **options: Any) -> Any:
        if not _is_closed:
            return choose(self, *arguments, **options)
        held = [request for request in self.waiting_queue if not is_probe(request.rid)]
        self.waiting_queue = [request for request in self.waiting_queue if is_probe(request.rid)]
        try:
            return choose(self, *arguments, **options)
        finally:
            self.waiting_queue = held + self.waiting_queue

    Scheduler.get_next_batch_to_run = get_next_batch_to_run
