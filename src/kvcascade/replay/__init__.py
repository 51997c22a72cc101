"""Request traces: played against a real stack with real bytes, or simulated without any."""
