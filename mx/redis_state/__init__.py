"""State of coordinators in Redis, which several share."""
