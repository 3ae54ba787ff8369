"""Rows of releases, builds and Pythons: an environment for each, the tests that run in it, and the table of all."""
