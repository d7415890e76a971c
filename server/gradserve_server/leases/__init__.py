"""How long things live that nobody deletes. Time comes in as a clock."""
