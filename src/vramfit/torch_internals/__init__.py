"""The seam to torch's internals: every private name of torch that vramfit reads, replaces or calls stands here.

One module per area of torch, with public names for torch's private ones. What differs between releases is decided here,
each time with since when and the file of PyTorch that says so; nothing above this floor asks for the release to find a
name. A name that the installed torch lacks switches off what needs it, and says so (`names`).
"""
