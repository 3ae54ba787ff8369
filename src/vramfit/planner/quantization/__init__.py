"""Chooses formats of weights for a live model within a budget of bytes: runs on the virtual card, values here."""
