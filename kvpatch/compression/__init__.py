"""Methods that cut a prompt to its budget before anything is decoded."""
