"""``prfaas egress``: one TLS port before several KV nodes."""
