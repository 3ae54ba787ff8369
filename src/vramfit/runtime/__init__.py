"""What acts while a program runs on a real device: recovery, batch sizes, and tiers of memory."""
