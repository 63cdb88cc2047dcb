"""The HTTP frontends: the gRPC contract as JSON, and the endpoints that slime and OpenRLHF call."""
