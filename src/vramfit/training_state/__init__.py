"""The state of a training: one walk over what a step or a model reaches, and notes of it that can be put back.

What to look at (`Scope`), what to copy and where the copies go, and when to do so is each user's own.
"""
