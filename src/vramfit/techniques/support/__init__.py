"""What several techniques share."""
