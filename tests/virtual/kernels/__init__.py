"""Tests of what kernels allocate beyond their outputs."""
