"""transformers: models that are built at once and compute while their layers arrive."""
