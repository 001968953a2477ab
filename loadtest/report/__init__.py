"""Results: tables for a terminal, charts, HTML pages and JSON records."""
