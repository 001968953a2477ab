"""What rounds would cost: bytes, hours, utilisation and memory of each way of making them, before anybody trains."""
