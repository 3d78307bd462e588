"""``python -m refattn``: the command line."""

from refattn.cli import main

if __name__ == "__main__":
    main()
