"""What `mx demo` shows: a coordinator, a source and pulls between real processes on this machine.

`mx.demo.run.run` does it; `mx.cli.demo` is the command.
"""
