"""Who holds memory: chains from the program's own names down to a tensor, and how much hangs on a name."""
