"""`python -m pipeloom` is `pipeloom`."""

from pipeloom.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
