"""Options of a run: what every door to a run takes, declared once. Imports no torch."""
