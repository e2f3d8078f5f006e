"""Exceptions that carry a user's mistake, printed as plain lines and never as a traceback, another rank's or
another program's failure, or the wish to stop.
"""


class UserError(Exception):
    """A mistake of the user's that one line can explain: the place, the value and what is allowed.

    Entry points print `str(error)` on rank 0 and leave with exit code 2 on every rank.
    """


class SharedUserError(UserError):
    """A user's mistake that all ranks find and raise alike: they can still save the last finished step
    together.
    """


class ConfigError(UserError):
    """All mistakes of one configuration, one line each."""

    def __init__(self, problems: list[str]):
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


class RelayedError(RuntimeError):
    """A failure of one rank that all ranks raise alike, between two collectives; on the rank that met it, it
    is the cause.
    """


class ForeignError(RuntimeError):
    """What another program did wrong, or left undone: its line says all. The traceback through our code is
    kept in the run folder and not printed.
    """


class StopRequested(Exception):
    """Leaves the loop on all ranks alike, at a point where the state of the last finished step can be
    saved.
    """
