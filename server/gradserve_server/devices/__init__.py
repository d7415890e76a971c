"""Where arrays live and arithmetic runs."""
