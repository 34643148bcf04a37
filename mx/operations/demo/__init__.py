"""What `mx demo` shows: a coordinator, a source and pulls between real processes on this machine.

`mx.operations.demo.run.run` does it; `mx.operations.verbs.demo` is the command.
"""
