"""Reports of plans, of the largest size that fits, and of verifications: one module per verb."""
