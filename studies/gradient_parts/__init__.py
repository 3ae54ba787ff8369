"""Parts of `plan_gradients.py`."""
