"""vLLM behind a node: a KV connector that runs inside vLLM, and the node's side of it, which knows vLLM by HTTP only.

``connector`` is the one module that imports vLLM, and vLLM is who imports it. What vLLM's processes load of ours needs
nothing but msgspec and the torch that they have.
"""
