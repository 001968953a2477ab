"""Results: tables for a terminal, and JSON records."""
