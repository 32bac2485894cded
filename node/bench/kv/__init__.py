"""``prfaas bench kv``: KV from one process to another by the code that serves, with a recording in a model's place."""
