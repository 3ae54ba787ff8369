"""What searches ran, kept for later ones."""
