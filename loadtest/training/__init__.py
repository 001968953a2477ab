"""A training whose machines are not there: in a lab or on loopback, watched, and broken on purpose."""
