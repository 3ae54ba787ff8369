"""Predictions beside recordings: rows, who works them out, and the tables that show them."""
