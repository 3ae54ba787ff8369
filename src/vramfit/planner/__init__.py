"""Finds the cheapest set of techniques with which a workload stays within a budget."""
