"""Lets ``python -m vramfit`` do what ``vramfit`` does."""

from vramfit.entry import main

if __name__ == "__main__":
    main()
