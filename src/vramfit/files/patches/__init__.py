"""The patches backend: Python's file functions, and those of libraries, are led into an overlay."""
