"""What keeps a run from hanging or from being lost without a word: first errors, stalls, signals,
restarts.
"""
