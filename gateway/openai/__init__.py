"""The OpenAI dialect: requests in, responses and SSE chunks out."""
