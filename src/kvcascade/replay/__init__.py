"""Request traces: played against a real stack with real bytes (`runner`), or simulated without any (`simulate`)."""
