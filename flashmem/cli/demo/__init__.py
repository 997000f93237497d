"""`flashmem demo`: two trained networks read the text in an image."""
