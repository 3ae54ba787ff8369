"""What acts while a program runs on a real device: recovery, batch sizes, tiers of memory, feeding and watching."""
