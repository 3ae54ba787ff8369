"""Chooses the size of each step's batch from what is free and from what steps took."""
