"""Stands in for TensorFlow, which the scripts import only to read weights that they would have downloaded."""
