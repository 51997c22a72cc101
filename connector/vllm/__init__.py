"""vLLM: the ways in which it can use a stack. Nothing is imported here, so that the parts which need no vLLM can
be used without it; `compat` is the only module that touches vLLM's names."""
