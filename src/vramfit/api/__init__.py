"""The Python interface: a program run and reported, code tracked, a virtual GPU in this process, leaks looked for."""
