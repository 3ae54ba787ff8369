"""What is commonly said about GPU memory, each saying with a program that checks it on the virtual GPU."""
