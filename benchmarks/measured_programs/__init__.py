"""Programs whose memory others measured and published as a figure, run on the virtual GPU beside that figure."""
