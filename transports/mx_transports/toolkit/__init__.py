"""What transports are built with. docs/transports.md walks through two of under 80 lines.

| module | what it has |
|---|---|
| `exposure` | `SocketExposure`: sources that readers connect to, with a secret |
| `sending` | `SendingExposure`: one that sends the bytes itself |
| `session` | `ThreadedSession`, `StreamSession`: a queue of reads, and threads that carry them |
| `slicing` | `steps`: a read in slices of the size that is reported to a sink |
| `stream` | `SocketStream`: whole buffers over a socket, plain or TLS, under a stall deadline |
| `framing` | preamble, answer, statuses and tickets |
| `dial`, `listeners`, `proof` | connecting and listening over a network; proving addresses |
| `unix` | the same over unix sockets, between processes of one user |
| `limiting` | sending under the limiter of an exposure's options |
| `tls` | contexts for data connections |
| `local` | sources and readers of one machine and one user: unix sockets, descriptors, a page |
| `reach` | whether two places share a network, or a machine and a user |
| `kernel` | process_vm_readv and memfd seals |
| `cuda` | what the transports of GPU memory share |
"""
