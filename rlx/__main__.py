"""`python -m rlx` is `rlx`."""

from rlx.cli.main import main

if __name__ == "__main__":
    main()
