"""vLLM's scheduler, which decodes probes while it is paused: `--scheduler-cls
scheduler.build_scheduler`.

A server is paused from an update's first bucket until its new version serves. After the commit every other
request waits without keys and values, so a probe is scheduled as if it were alone.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

from megagrpo.wire.probe_requests import is_probe


class _DecodesProbes:
    """What is added to a scheduler of vLLM."""

    def schedule(self: Any, *arguments: Any, **options: Any) -> Any:
        """Schedule as vLLM does; probes alone while paused, unless a request that is no probe holds keys
        and values.
        """
        if not _num_probes(self) or not all(is_probe(request.request_id) for request in self.running):
            return super().schedule(*arguments, **options)  # type: ignore[misc]
        held = [request for request in self.waiting if not is_probe(request.request_id)]
        self.waiting.remove_requests(held)
        self._pause_state = PauseState.UNPAUSED
        try:
            return super().schedule(*arguments, **options)  # type: ignore[misc]
        finally:
            self._pause_state = PauseState.PAUSED_ALL
            for request in held:
                self.waiting.add_request(request)

    def get_num_unfinished_requests(self: Any) -> int:
        """Return how many requests there is work for."""
        return super().get_num_unfinished_requests() + _num_probes(self)  # type: ignore[misc]


def _num_probes(scheduler: Any) -> int:
    """Return the number of probes, if the scheduler is paused (vLLM then has work for no request)."""
    if scheduler.pause_state != PauseState.PAUSED_ALL:
        return 0
    return sum(is_probe(request.request_id) for request in [*scheduler.running, *scheduler.waiting])


class _Scheduler(_DecodesProbes, Scheduler):
    pass


class _AsyncScheduler(_DecodesProbes, AsyncScheduler):
    pass


def build_scheduler(vllm_config: Any, **options: Any) -> Scheduler:
    """Return the scheduler that vLLM would take for this configuration, with what is added."""
    kind = _AsyncScheduler if vllm_config.scheduler_config.async_scheduling else _Scheduler
    return kind(vllm_config=vllm_config, **options)
