"""How a rank leaves. torchrun restarts on every code but 0, `megagrpo run` not after USER_ERROR and
INTERRUPTED either. No torch here.
"""

DONE = 0  # finished, or saved and stopped because it was asked to
FAILED = 1  # this rank met the first error
USER_ERROR = 2  # a mistake of the user's on some rank, told in plain lines; or the last save failed
PEER_FAILED = 3  # another rank met the first error, no mistake of the user's, and has told it
STALLED = 4  # no progress within the budget of a phase
INTERRUPTED = 130  # the second Ctrl-C: nothing was saved
