"""The HTTP gateway: an OpenAI-compatible API and two pages in front of a router."""
