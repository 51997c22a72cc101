"""Engines: what stands between an engine and the manager. Empty until an engine is served."""
