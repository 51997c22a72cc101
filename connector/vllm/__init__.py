"""vLLM: the ways in which it can use a stack. Nothing is imported here, so that the parts which need no vLLM can
be used without it; the modules `compat`, `compat_tier` and `compat_names` are all that touches vLLM's names."""
