"""Random folders, each served and pulled: what is missing in the copy is what was named."""
