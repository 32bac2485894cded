"""`prfaas gateway --workers N`: processes that share a port, each a gateway among several over one Redis."""
