"""Tests of vramfit.analysis."""
