"""Where clients look up the addresses of servers, if their users name a place that knows them."""
