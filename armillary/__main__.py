"""Lets `python -m armillary` do what the command `armillary` does."""

from armillary._cli import main

if __name__ == "__main__":
    raise SystemExit(main())
