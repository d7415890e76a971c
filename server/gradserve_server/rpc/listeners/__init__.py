"""Listens for calls: ports, socket files, and the gRPC servers behind them."""
