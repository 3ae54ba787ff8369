"""Tests of vramfit.report."""
