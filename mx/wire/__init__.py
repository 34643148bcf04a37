"""The use of gRPC: channels, servers, statuses, documents, the coordinator's client."""
