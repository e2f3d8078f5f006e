"""`python -m megagrpo`: the `megagrpo` command."""

from megagrpo.cli import main

if __name__ == "__main__":  # the checkpoint writer spawns a process that imports this module again
    main()
