"""The transports that come with mx. Each is found by the entry-point group `mx.transports`."""
