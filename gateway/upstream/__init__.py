"""The gateway's own HTTP/1.1 client: what it says to engines that speak OpenAI's API."""
