"""Carries the exchanges of operations out over gRPC: blocking, and with asyncio."""
