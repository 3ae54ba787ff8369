"""Model families of transformers, each in a tiny form, trained and run on the virtual GPU."""
