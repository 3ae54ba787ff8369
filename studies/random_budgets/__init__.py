"""What `budgets.py` draws, plans, measures and shows."""
