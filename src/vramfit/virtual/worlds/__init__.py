"""Worlds: several ranks of a distributed program, each in a process of its own on this machine.

- `launchers`: the commands that start them (torchrun, accelerate, deepspeed), read. No torch.
- `rank_choice`: which ranks to run, and which of the others each stands for. No torch.
- `rank_places`: which ranks hold the same place in the program's groups, and are alike for that. No torch.
- `world_run`: runs them side by side, with those that they wait for. No torch.
"""
