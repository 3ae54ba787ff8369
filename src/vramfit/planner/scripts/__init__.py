"""Plans for a program as it is: its candidates are runs of the program, with the techniques attached from outside."""
