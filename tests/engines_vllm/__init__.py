"""The real vLLM on CPU. ``sh deploy/test.sh --engines`` installs it into a venv of its own and runs this."""
