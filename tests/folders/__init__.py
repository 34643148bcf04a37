"""Random folders, each served, pulled and loaded; see `tests.folders.__main__`."""
