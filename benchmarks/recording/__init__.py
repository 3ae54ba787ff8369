"""Making recordings on a card, and keeping them: `program` runs on the card, `store` holds what it found."""
