<<<<<<< HEAD
"""Parameters: variables on the server that an optimizer moves by the updates of each round."""
=======
"""Parameters that the server holds: their rules, rounds, optimizers and versions."""
>>>>>>> closing
