"""Worlds: several ranks of a distributed program, each in a process of its own on this machine.

- `launchers`: the commands that start them (torchrun, accelerate, deepspeed), read. No torch.
- `rank_choice`: which ranks to run, and which of the others each stands for. No torch.
- `world_run`: runs them side by side, with those that they wait for. No torch.
"""
