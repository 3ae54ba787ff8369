"""Where the steps of workloads are priced: a virtual card, a real one, the CPU."""
