"""The daemon that knows who holds what. In no data path."""
