"""`flashmem demo`: text in an image, read by two trained networks."""
