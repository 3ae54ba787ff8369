"""Inference within a budget: what tiles take, beside what others do."""
