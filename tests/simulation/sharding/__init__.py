"""Accumulators that are sharded over several simulated servers: real clients, real servers, a simulated network."""
