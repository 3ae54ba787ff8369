"""Lets ``python -m vramfit`` do what ``vramfit`` does."""

from vramfit.console_entry import main

if __name__ == "__main__":
    main()
