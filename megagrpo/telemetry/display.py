"""The screen of a run: lines that stay, and below them what is done now. Where there is no terminal, a line a
minute takes its place.
"""

import threading
import time
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from megagrpo.telemetry.activity import Activity

PLAIN_WIDTH = 100  # columns of a line where there is no terminal
HEARTBEAT_SECONDS = 60.0
_REFRESHES_PER_SECOND = 4


class _Console(Console):
    def show_cursor(self, show: bool = True) -> bool:
        """Leave the cursor as it is: a rank that is ended at once could not bring it back."""
        return False


class Display:
    """Shows an `Activity` until it is closed. Only rank 0 holds one."""

    def __init__(
        self, activity: Activity, file: TextIO | None = None, heartbeat_seconds: float = HEARTBEAT_SECONDS
    ):
        """Open the screen.

        Args:
            file: where to print; standard output where None.
            heartbeat_seconds: between two lines of a screen that would show nothing otherwise.
        """
        self.activity, self._heartbeat_seconds = activity, heartbeat_seconds
        self._console = _Console(file=file, highlight=False, soft_wrap=True)
        self._printed_at = time.monotonic()
        self._closed = threading.Event()
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(
                console=self._console,
                get_renderable=self._now,
                refresh_per_second=_REFRESHES_PER_SECOND,
                transient=True,
            )
            self._live.start()
        else:
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    @property
    def width(self) -> int:
        """Columns of a line."""
        return self._console.width if self._console.is_terminal else PLAIN_WIDTH

    def print(self, text: Text) -> None:
        """Print lines that stay."""
        self._printed_at = time.monotonic()
        self._console.print(text)

    def close(self) -> None:
        """Show nothing further; lines can still be printed."""
        self._closed.set()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _now(self) -> Text:
        return Text(self.activity.describe(), style="dim", no_wrap=True, overflow="ellipsis")

    def _beat(self) -> None:
        while not self._closed.wait(min(1.0, self._heartbeat_seconds)):
            if time.monotonic() - self._printed_at >= self._heartbeat_seconds:
                self.print(Text(f"... {self.activity.describe()}"))
