"""What a program trains, found out while it runs and without its help: models, optimizers, loaders, its loop."""
