"""The lifetimes of resources that nobody deletes. Time comes from a clock that is passed in."""
