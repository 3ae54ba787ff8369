"""Plays the requests of a trace again on another allocator, or on a card."""
