"""Carries out the exchanges of operations over gRPC: blocking, and with asyncio."""
