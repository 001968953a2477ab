"""Two ideas for a mode of one sweep a chunk, measured before anything is served: `lagged` and `planned`."""
