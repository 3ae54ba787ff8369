"""The state that steps move: what a function reaches, and notes of it that can be put back."""
