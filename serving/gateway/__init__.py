"""The HTTP face: an OpenAI-compatible API and two pages, in front of a router."""
