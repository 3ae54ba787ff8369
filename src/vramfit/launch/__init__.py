"""Runs a program as python would, in a child interpreter: what the virtual GPU and the recorder share.

- `job`: what passes between the parent and the child.
- `starting`: where every process of vramfit is started.
- `nursery`: children that begin with torch imported, as forks.
- `tasks`: many things side by side, each in a process of its own.
- `runner`: the parent's side, without torch.
- `running`: the child's side: ``python script.py`` or ``python -m module``, and its end.
"""
