"""How nodes of a cluster come in: join tokens, approval, certificates, and who is turned away."""
