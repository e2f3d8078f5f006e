"""Work of one rank that goes on in a thread while the rank does something else."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from megagrpo.device import device as device_module

Result = TypeVar("Result")


class BackgroundWork(Generic[Result]):
    """A function that runs in a thread of its own. It must not communicate: collectives are entered by the
    main thread alone.

    The thread is a daemon: a process that has to end doesn't wait for it.
    """

    def __init__(self, function: Callable[[], Result], name: str):
        """Start it."""
        self._function = function
        self._outcome: Result | BaseException
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with device_module.background_stream():
                self._outcome = self._function()
        except BaseException as error:  # handed to the thread that waits: this thread has no caller
            self._outcome = error

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it has ended, at most `seconds`; say whether it has. Raises nothing of its own."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def outcome(self) -> Result | BaseException:
        """Wait, and return what the function returned or raised."""
        self._thread.join()
        return self._outcome
