"""What studies/hand_recipes.py is made of."""
