"""`python -m bitwright`: the command line."""

from bitwright.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
