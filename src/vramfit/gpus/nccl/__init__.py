"""NCCL: what it takes of a card outside torch's allocator, and how long its collectives take. Pure functions."""
