"""Tests of vramfit.cli."""
