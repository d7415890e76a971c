"""Parameters: variables on the server that an optimizer moves by the updates of each round."""
