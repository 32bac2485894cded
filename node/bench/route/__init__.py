"""``prfaas bench route``: how long a gateway takes to find a prompt in a full prefix index and to route it."""
