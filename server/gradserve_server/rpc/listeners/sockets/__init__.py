"""The listener for sockets that carry whole calls in frames; docs/sockets.md specifies them."""
