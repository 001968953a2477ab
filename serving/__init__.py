"""The side that users talk to: topology, router, generation modes, client, command line."""
