"""What values decide: true values where they are known, guesses and assumed sizes where they are not."""
