"""Feeding a card: batches brought ahead, data sets in mapped files, and what a loader's workers are worth."""
