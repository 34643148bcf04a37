"""The use of gRPC: channels, servers, statuses, documents, the coordinator's client."""

import os

# A child that is forked while gRPC runs can't use it anyway (`mx.forks`); where gRPC's own handlers
# start threads in the child nevertheless, some children die of SIGSEGV. gRPC looks when it is
# imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # noqa: TID251 - set, not read
