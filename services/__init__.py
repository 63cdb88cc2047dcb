"""The servers of Penstock. A service imports penstock and itself, never another service."""

import penstock  # noqa: F401 - it configures gRPC, which reads that when it is imported
