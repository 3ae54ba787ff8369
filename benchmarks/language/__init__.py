"""Language models within a budget, beside what others offer."""
