"""Links as in the field, on one machine: capped in a network of their own, and delayed by a relay."""
