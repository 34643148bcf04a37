"""The verbs of the operations pack, one module each."""
