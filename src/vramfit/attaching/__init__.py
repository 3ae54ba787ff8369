"""Puts techniques onto a program that knows nothing of them: onto the model and the optimizer that it makes."""
