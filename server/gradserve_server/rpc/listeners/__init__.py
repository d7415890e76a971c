"""Where the server listens: ports, socket files, and the gRPC servers behind them."""
