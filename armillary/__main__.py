"""Makes `python -m armillary` the same as the command `armillary`."""

from armillary._cli import main

if __name__ == "__main__":
    raise SystemExit(main())
