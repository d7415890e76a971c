"""Accumulators that are spread over the servers of a cluster: what each server has of them."""
