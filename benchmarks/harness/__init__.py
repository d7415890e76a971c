"""How contestants are started, measured in alternation, compared and reported."""
