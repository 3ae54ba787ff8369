"""Predictions beside recordings: `rows` says what is compared, `predictions` and `peers` predict, `tables` shows it."""
