"""Where the steps of workloads are run: a virtual card, a real one, the CPU."""
