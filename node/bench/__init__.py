"""``prfaas bench``: figures of this machine, measured with the code that serves."""
