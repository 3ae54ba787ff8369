"""Parts of studies/planner.py."""
