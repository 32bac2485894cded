"""`prfaas bench relay`: what a gateway in front of an OpenAI engine costs a streamed chunk and a request."""
