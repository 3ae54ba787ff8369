"""vramfit inside the tools that people have already. Each module needs the tool that it is for, and says so."""
