"""Requests to engines that answer them whole: below the web framework, streamed bytes passed on as they come."""
