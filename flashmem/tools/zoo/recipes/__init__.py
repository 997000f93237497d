"""One module for each family of architectures: configurations, and what its weights need to make a useful reference."""
