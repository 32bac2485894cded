"""The operator's own certificates: an offline root, an intermediate that signs, and what they sign."""
