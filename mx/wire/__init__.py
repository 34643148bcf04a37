"""gRPC plumbing: channels, servers, statuses, documents, the coordinator's client."""
