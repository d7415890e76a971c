"""The calls on parameters: variables that the server holds, and that an optimizer changes at the end of each round.

`model` has their components and values, `spec` their properties as arguments and as messages, `wire` the messages of
each call, `fields` the arguments that errors name, `creation` finds, creates and deletes them by name, and `operations`
has the calls as users see them. Rounds, request ids and restarts are those of `calls.accumulators`.
"""
