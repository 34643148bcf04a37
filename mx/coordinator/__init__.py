"""The daemon that knows which sources hold which models. It is in no data path."""
