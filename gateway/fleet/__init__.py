"""External engines: OpenAI-like servers that prfaas did not start, and what is known of them."""
