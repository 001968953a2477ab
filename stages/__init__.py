"""A block host: the model's blocks, the noise maths, Euler steps, sessions and the stage server."""
