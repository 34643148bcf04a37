"""Where coordinators keep their state beyond their own memory: in a file, or in Redis."""
