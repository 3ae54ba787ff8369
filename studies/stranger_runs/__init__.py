"""Public scripts that nobody here wrote, run on the virtual GPU: manifest, environments, data, runs, table."""
