"""On which GPU of a mixture-of-experts fleet to decode a request: three policies and the cheapest of them, modelled."""
