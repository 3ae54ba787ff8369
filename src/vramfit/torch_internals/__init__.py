"""Every private name of torch that vramfit reads, replaces or calls, and where releases differ: one module per area."""
