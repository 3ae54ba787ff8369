"""What `vramfit check` found, for continuous integration: annotations, a step summary, and JUnit XML."""
