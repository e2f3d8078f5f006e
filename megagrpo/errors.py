"""Exceptions that carry a user's mistake: printed as plain lines, never as a traceback."""


class UserError(Exception):
    """A mistake of the user's that one line can explain: the place, the value and what is allowed.

    Entry points print `str(error)` on rank 0 and leave with exit code 2 on every rank.
    """


class ConfigError(UserError):
    """All mistakes of one configuration, one line each."""

    def __init__(self, problems: list[str]):
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))
