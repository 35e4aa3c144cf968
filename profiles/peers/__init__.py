"""Other implementations of the same methods, run beside ours."""
