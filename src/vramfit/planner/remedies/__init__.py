"""Remedies that are tried where a program does not fit, each in the program's own words and run just so."""
