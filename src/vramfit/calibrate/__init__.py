"""Calibration: a grid of ops measured on a card, compared with what the virtual GPU says of them."""
